// State in less memory: bf16 moments, masters as bf16 weight and remainder. Files do not change.
#include <gmock/gmock.h>

#include <cmath>
#include <memory>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/optim/adagrad.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/sgd.h"
#include "reference.h"
#include "support.h"
#include "support/step.h"

namespace cairn::optim {
namespace {

using reference::Values;
using testing::HasSubstr;

constexpr StateOptions kSmall{.moments = DType::bf16, .masters = MasterStorage::remainder};

NamedTensors bf16_parameters(Device device = core::default_device()) {
  return {make_parameter("layer.weight", {37, 11}, 1, DType::bf16, device),
          make_parameter("layer.bias", {7}, 2, DType::bf16, device),
          make_parameter("norm.weight", {5}, 3, DType::f32, device)};
}

std::vector<std::unique_ptr<Optimizer>> one_of_each(const NamedTensors& p) {
  std::vector<std::unique_ptr<Optimizer>> all;
  all.push_back(std::make_unique<FusedAdam>(p, AdamOptions{.lr = 1e-2}));
  all.push_back(std::make_unique<FusedSGD>(p, SgdOptions{.lr = 1e-2, .momentum = 0.9}));
  all.push_back(std::make_unique<FusedAdagrad>(p));
  all.push_back(std::make_unique<FusedNovoGrad>(p));
  all.push_back(std::make_unique<FusedLAMB>(p));
  return all;
}

Tensor exact_values(const Shape& shape, std::uint64_t seed, Device device) {
  return test::random_tensor(shape, DType::f32, device, seed);
}

class StorageOnDevice : public testing::TestWithParam<Device> {};

/// The truth of a weight does not depend on how it is kept.
TEST_P(StorageOnDevice, RemaindersTrainAsMastersDoBitForBit) {
  for (std::size_t kind = 0; kind < 5; ++kind) {
    const NamedTensors a = bf16_parameters(GetParam()), b = bf16_parameters(GetParam());
    const auto with_masters = std::move(one_of_each(a)[kind]);
    const auto with_remainders = std::move(one_of_each(b)[kind]);
    with_remainders->set_state_options({.masters = MasterStorage::remainder});
    for (std::size_t i = 0; i < 2; ++i) {
      const Shape shape = a[i].tensor.shape();
      kernels::MasterWeight::assign(a[i].tensor, exact_values(shape, 10 + i, GetParam()));
      kernels::MasterWeight::assign(b[i].tensor, exact_values(shape, 10 + i, GetParam()),
                                    MasterStorage::remainder);
    }
    for (std::uint64_t step = 0; step < 20; ++step) {
      for (const NamedTensors* parameters : {&a, &b}) write_gradients(*parameters, 7 * step);
      test::expect_applied(with_masters->step());
      test::expect_applied(with_remainders->step());
    }
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(values(kernels::master_value(a[i].tensor)),
                values(kernels::master_value(b[i].tensor)))
          << kind;
    }
    EXPECT_NE(test::kept_as(b[0].tensor), MasterStorage::f32);
    EXPECT_EQ(kernels::MasterWeight::of(b[0].tensor)->tensor().dtype(), DType::i16);
    EXPECT_NE(test::kept_as(b[2].tensor), MasterStorage::remainder);
  }
}

TEST_P(StorageOnDevice, Bf16MomentsFollowTheRule) {
  const NamedTensors parameters = bf16_parameters(GetParam());
  FusedAdam optimizer(parameters, {.lr = 1e-2});
  optimizer.set_state_options({.moments = DType::bf16});
  std::vector<reference::Adam> references(3, {{.lr = 1e-2}});
  std::vector<Values> expected;
  for (const auto& [name, tensor] : parameters) expected.push_back(values(tensor));
  const auto round = [](Values& v) {
    const Shape shape{static_cast<std::int64_t>(v.size())};
    v = values(Tensor::from(v, shape, DType::bf16));
  };
  for (std::uint64_t step = 0; step < 6; ++step) {
    write_gradients(parameters, 9 * step);
    for (std::size_t i = 0; i < 3; ++i) {
      references[i].update(expected[i], values(parameters[i].tensor.grad()));
      round(references[i].m), round(references[i].v);
    }
    test::expect_applied(optimizer.step());
  }
  // The moments' roundings may differ at near ties: 2^-9 of an update of at most lr or so.
  for (std::size_t i = 0; i < 3; ++i) {
    test::expect_close(kernels::master_value(parameters[i].tensor), expected[i], 0, 1e-4);
  }
}

TEST_P(StorageOnDevice, FilesAreTheSameAndLoadsConvert) {
  for (std::size_t kind = 0; kind < 5; ++kind) {
    const NamedTensors a = bf16_parameters(GetParam()), b = bf16_parameters(GetParam());
    const auto plain = std::move(one_of_each(a)[kind]), small = std::move(one_of_each(b)[kind]);
    small->set_state_options(kSmall);
    for (std::uint64_t step = 0; step < 3; ++step) {
      write_gradients(b, 7 * step);
      test::expect_applied(small->step());
    }
    const StateDict file = snapshot(small->state_dict());
    const StateDict& entry = file.dict("state").dict("layer").dict("weight");
    for (const auto& [key, value] : entry) {
      const auto* tensor = std::get_if<Tensor>(&value);
      EXPECT_TRUE(tensor == nullptr || tensor->dtype() == DType::f32) << key;
    }
    plain->load_state_dict(file);
    for (std::size_t i = 0; i < 3; ++i) {
      kernels::copy(b[i].tensor, a[i].tensor);
      if (i < 2) kernels::MasterWeight::assign(a[i].tensor, kernels::master_value(b[i].tensor));
    }
    plain->set_state_options(kSmall);  // exact: the moments are bf16 values
    for (const NamedTensors* parameters : {&a, &b}) write_gradients(*parameters, 99);
    test::expect_applied(plain->step());
    test::expect_applied(small->step());
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(values(kernels::master_value(a[i].tensor)),
                values(kernels::master_value(b[i].tensor)))
          << kind;
    }
    small->load_state_dict(file);  // back, and on
    EXPECT_EQ(small->steps(), 3);
  }
}
INSTANTIATE_TEST_SUITE_P(Devices, StorageOnDevice, testing::ValuesIn(test::devices()),
                         test::device_name);

TEST(Storage, BytesOfAParameter) {
  const auto state = [] {
    return core::memory_stats(core::default_device()).of(core::MemoryCategory::optimizer_state);
  };
  for (const bool small : {false, true}) {
    const std::size_t before = state();
    const NamedTensors parameters = {make_parameter("w", {4096}, 1, DType::bf16)};
    FusedAdam optimizer(parameters);
    if (small) optimizer.set_state_options(kSmall);
    write_gradients(parameters, 1);
    test::expect_applied(optimizer.step());
    EXPECT_EQ(state() - before, 4096u * (small ? 2 + 4 : 4 + 8));
  }
}

TEST(Storage, ConvertsOnTheWay) {
  const NamedTensors parameters = bf16_parameters();
  FusedAdam optimizer(parameters, {.lr = 1e-2});
  write_gradients(parameters, 1);
  test::expect_applied(optimizer.step());
  const Values truth = values(kernels::master_value(parameters[0].tensor));
  optimizer.set_state_options({.masters = MasterStorage::remainder});
  write_gradients(parameters, 2, 0.0);
  optimizer.set_lr(0.0);
  test::expect_applied(optimizer.step());
  EXPECT_NE(test::kept_as(parameters[0].tensor), MasterStorage::f32);
  EXPECT_EQ(values(kernels::master_value(parameters[0].tensor)), truth);
  optimizer.set_state_options({});
  write_gradients(parameters, 2, 0.0);
  test::expect_applied(optimizer.step());
  EXPECT_NE(test::kept_as(parameters[0].tensor), MasterStorage::remainder);
  EXPECT_EQ(values(kernels::MasterWeight::of(parameters[0].tensor)->tensor()), truth);
  optimizer.set_master_weights(false);
  EXPECT_NE(test::kept_as(parameters[0].tensor), MasterStorage::f32);
}

TEST(Storage, RefusesWhatCannotBe) {
  const NamedTensors parameters = {make_parameter("half", {4}, 1, DType::f16),
                                   make_parameter("single", {4}, 1)};
  FusedSGD optimizer(parameters, {});
  try {
    optimizer.set_state_options({.masters = MasterStorage::remainder});
    ADD_FAILURE() << "no error";
  } catch (const core::InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("'half' of f16"));
  }
  EXPECT_THROW(optimizer.set_state_options({.moments = DType::f16}), core::InvalidArgument);
  EXPECT_THROW(kernels::MasterWeight::assign(parameters[1].tensor, Tensor::zeros({4})),
               core::InvalidArgument);
  EXPECT_THROW(kernels::MasterWeight::assign(parameters[0].tensor, Tensor::zeros({3})),
               core::InvalidArgument);
  EXPECT_THROW(kernels::MasterWeight::assign(parameters[0].tensor, Tensor::zeros({4}),
                                             MasterStorage::remainder),
               core::InvalidArgument);
}

TEST(Storage, TheMasterTakesOverUnsharedMemory) {
  const Tensor half = make_parameter("w", {8}, 1, DType::f16).tensor;
  Tensor exact = test::random_tensor({8}, DType::f32, core::default_device(), 5);
  const Values truth = values(exact);
  const void* memory = exact.raw_data();
  kernels::MasterWeight::assign(half, exact);  // the caller still has it
  EXPECT_NE(kernels::MasterWeight::of(half)->tensor().raw_data(), memory);
  kernels::MasterWeight::assign(half, std::move(exact));
  EXPECT_EQ(kernels::MasterWeight::of(half)->tensor().raw_data(), memory);
  EXPECT_EQ(values(kernels::master_value(half)), truth);
  EXPECT_EQ(values(half), values(Tensor::from(truth, {8}, DType::f16)));
}

}  // namespace
}  // namespace cairn::optim
