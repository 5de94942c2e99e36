// compare_across_ranks: ranks that have drifted apart, by name.
#include "cairn/parallel/compare.h"

#include <gtest/gtest.h>

#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/multi_tensor.h"
#include "environment.h"
#include "ranks.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using core::DataError;
using core::InvalidArgument;
using test::expect_error;
using test::run_ranks;
using test::run_threads;
using Ranks = std::vector<int>;

/// The same on every rank.
NamedTensors make_tensors() {
  NamedTensors tensors;
  const auto add = [&](const char* name, const Shape& shape, DType dtype) {
    const Tensor x = test::normal_tensor(shape, tensors.size() + 1);
    tensors.push_back({name, Tensor::from(x.to_vector<float>(), shape, dtype)});
  };
  add("conv.weight", {16, 3, 5, 5}, DType::f32);
  add("conv.bias", {16}, DType::f32);
  add("fc.weight", {10, 129}, DType::bf16);
  add("fc.bias", {10}, DType::f16);
  add("steps", {1}, DType::i64);
  return tensors;
}

/// Changes the last bit of one element.
void flip(const Tensor& tensor, std::int64_t element) {
  const auto size = static_cast<std::int64_t>(core::size_of(tensor.dtype()));
  const TensorView place(static_cast<std::byte*>(tensor.raw_data()) + element * size, {1},
                         DType::u8, tensor.device());
  const Tensor byte = Tensor::empty({1}, DType::u8, Device{});
  const core::Stream stream = core::Stream::current(tensor.device());
  core::copy_bytes(place, byte);
  stream.synchronize();
  byte.data<std::uint8_t>()[0] ^= 1;
  core::copy_bytes(byte, place);
  stream.synchronize();
}

void check_drift(ProcessGroup& group) {
  const NamedTensors tensors = make_tensors();
  const int rank = group.rank(), last = group.world_size() - 1;
  EXPECT_TRUE(compare_across_ranks(tensors, group).none());
  check_same_across_ranks(tensors, group);

  if (rank == last) flip(tensors[2].tensor, 1289);
  RankDifference difference = compare_across_ranks(tensors, group);
  EXPECT_EQ(difference.tensor, "fc.weight");
  EXPECT_EQ(difference.ranks, Ranks{last});
  EXPECT_EQ(difference.tensors, 1u);
  EXPECT_EQ(difference.describe(), core::str("'fc.weight' is not rank 0's on rank ", last));

  if (rank == 0) flip(tensors[1].tensor, 3);  // then everybody else differs from rank 0
  difference = compare_across_ranks(tensors, group);
  Ranks others;
  for (int r = 1; r <= last; ++r) others.push_back(r);
  EXPECT_EQ(difference.tensor, "conv.bias");
  EXPECT_EQ(difference.ranks, others);
  EXPECT_EQ(difference.tensors, 2u);
  expect_error<DataError>([&] { check_same_across_ranks(tensors, group); },
                          {"[check_same_across_ranks] expected the same bits on every rank",
                           "'conv.bias' is not rank 0's on rank", "(and 1 more tensor differs)"});
}

TEST(Compare, FindsADifferenceInAnyTensor) {
  for (std::size_t i = 0; i < make_tensors().size(); ++i) {
    run_threads(2, [i](ProcessGroup& group) {
      const NamedTensors tensors = make_tensors();
      if (group.rank() == 1) flip(tensors[i].tensor, 0);
      EXPECT_EQ(compare_across_ranks(tensors, group).tensor, tensors[i].name);
    });
  }
}

TEST(Compare, NamesTheTensorAndTheRanksInProcesses) {
  run_ranks(3, check_drift);
}
TEST(Compare, NamesTheTensorAndTheRanksInThreads) {
  run_threads(4, check_drift);
  run_threads(2, check_drift);
}

TEST(Compare, IsNothingInAGroupOfOne) {
  const ProcessGroup group = ProcessGroup::single();
  EXPECT_TRUE(compare_across_ranks(make_tensors(), group).none());
  EXPECT_TRUE(compare_across_ranks({}, group).none());
}

TEST(Compare, WaitsForTheDeviceOnce) {
  run_threads(1, [](ProcessGroup& group) {
    const std::int64_t before = kernels::host_reads();
    compare_across_ranks(make_tensors(), group);
    EXPECT_EQ(kernels::host_reads(), before + 1);
  });
}

/// Every rank must throw.
void expect_list_error(const std::function<void(NamedTensors&, int rank)>& change,
                       std::initializer_list<std::string> texts) {
  run_threads(3, [&](ProcessGroup& group) {
    NamedTensors tensors = make_tensors();
    change(tensors, group.rank());
    expect_error<InvalidArgument>([&] { compare_across_ranks(tensors, group); }, texts);
    EXPECT_TRUE(compare_across_ranks(make_tensors(), group).none());  // the group still works
  });
}

TEST(Compare, NamesWhereTheListsDiffer) {
  expect_list_error(
      [](NamedTensors& tensors, int rank) {
        if (rank == 2) tensors.pop_back();
      },
      {"[compare_across_ranks]", "'steps' i64[1] on rank 0", "nothing more on rank 2"});
  expect_list_error(
      [](NamedTensors& tensors, int rank) {
        if (rank == 1) tensors[1].tensor = Tensor::zeros({17});
      },
      {"'conv.bias' f32[16] on rank 0", "'conv.bias' f32[17] on rank 1"});
  expect_list_error(
      [](NamedTensors& tensors, int rank) {
        if (rank == 1) std::swap(tensors[0], tensors[2]);
      },
      {"'conv.weight'", "on rank 0", "'fc.weight'", "on rank 1"});
  expect_list_error(
      [](NamedTensors& tensors, int rank) {
        if (rank == 1) tensors.clear();
      },
      {"'conv.weight'", "nothing more on rank 1"});
}

TEST(Compare, ATensorWithGapsIsAnErrorOnEveryRank) {
  const auto with_gaps = [](const Tensor& x) { return x.alias(x.view().slice(1, 0, 2)); };
  expect_list_error(
      [&](NamedTensors& tensors, int rank) {
        if (rank == 1) tensors[2].tensor = with_gaps(tensors[2].tensor);
      },
      {"[compare_across_ranks] expected", "expected 'fc.weight' to be dense"});
  expect_list_error(
      [&](NamedTensors& tensors, int) { tensors[2].tensor = with_gaps(tensors[2].tensor); },
      {"expected 'fc.weight' to be dense"});
}

}  // namespace
}  // namespace cairn::parallel
