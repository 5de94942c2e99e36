// Tensors copied into one flat buffer and back, and parameters sent to every rank through one.
#include "cairn/parallel/flatten.h"

#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "ddp_support.h"
#include "ranks.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::InvalidArgument;
using test::expect_error;
using test::normal;
using test::run_threads;

TEST(Flatten, GoesThereAndBack) {
  const Tensor a = normal({2, 3}, 1), b = normal({4}, 2);
  const Tensor channels_last = Tensor::empty_strided({2, 3}, {1, 2}, DType::f32, Device{});
  kernels::copy(normal({2, 3}, 3), channels_last);
  const Tensor flat = flatten({a, b, channels_last});
  ASSERT_EQ(flat.shape(), Shape({16}));
  auto expected = a.to_vector<float>();
  const auto more = b.to_vector<float>();
  expected.insert(expected.end(), more.begin(), more.end());
  const auto* memory = static_cast<const float*>(channels_last.raw_data());
  expected.insert(expected.end(), memory, memory + 6);  // in the order of its memory
  EXPECT_EQ(flat.to_vector<float>(), expected);

  const Tensor c = Tensor::zeros({2, 3}), d = Tensor::zeros({4}),
               e = Tensor::empty_like(channels_last);
  unflatten(flat, {c, d, e}, 2.0);
  for (std::size_t i = 0; i < 6; ++i)
    EXPECT_EQ(e.to_vector<float>()[i], 2 * channels_last.to_vector<float>()[i]);
  EXPECT_EQ(c.to_vector<float>()[5], 2 * a.to_vector<float>()[5]);

  expect_error<InvalidArgument>([] { flatten(std::vector<TensorView>{}); },
                                {"at least one tensor"});
  const Tensor half = Tensor::zeros({2}, DType::f16);
  expect_error<InvalidArgument>([&] { flatten({a, half}); }, {"one dtype and device", "f16"});
  expect_error<InvalidArgument>([&] { unflatten(flat, {a, b}); }, {"10 elements", "16"});
}

TEST(Flatten, BroadcastsParametersOfAnyDtype) {
  run_threads(3, [](ProcessGroup& group) {
    const double own = group.rank() + 1;
    const NamedTensors tensors = {{"a", Tensor::full({3}, own)},
                                  {"b", Tensor::full({5}, own, DType::bf16)},
                                  {"c", Tensor::full({2, 2}, own)},
                                  {"n", Tensor::full({1}, own, DType::i64)}};
    std::vector<std::uint64_t> versions;
    for (const auto& [name, tensor] : tensors) versions.push_back(tensor.storage()->version());
    broadcast_parameters(tensors, group, 1);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (const double value : tensors[i].tensor.to_vector()) EXPECT_EQ(value, 2.0);
      EXPECT_GT(tensors[i].tensor.storage()->version(), versions[i]);
    }
  });
}

}  // namespace
}  // namespace cairn::parallel
