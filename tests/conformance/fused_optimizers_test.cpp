// FusedAdam, FusedAdagrad and FusedSGD at 278011 elements and 7 iterations against double
// precision (tests/optim has the same against PyTorch's values).
#include "cairn/optim/adagrad.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "many_elements.h"

namespace cairn::conformance {
namespace {

const bool kTwoDevices = ::setenv("CAIRN_CPU_DEVICES", "2", /*overwrite=*/1) == 0;

using optim::AdagradOptions;
using optim::AdamOptions;
using optim::FusedAdagrad;
using optim::FusedAdam;
using optim::FusedSGD;
using optim::SgdOptions;

/// The weight after all iterations, of one element.
double adam(const ManyElements& all, const AdamOptions& o, std::size_t t, std::int64_t i) {
  double w = all.weight(t, i), m = 0.0, v = 0.0;
  for (int k = 0; k < kIterations; ++k) {
    const double g = all.gradient(t, i, k) + (o.adamw ? 0.0 : o.weight_decay * w);
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double c1 = 1 - std::pow(o.beta1, k + 1), c2 = 1 - std::pow(o.beta2, k + 1);
    w -= o.lr * ((m / c1) / (std::sqrt(v / c2) + o.eps) + (o.adamw ? o.weight_decay * w : 0.0));
  }
  return w;
}

double adagrad(const ManyElements& all, const AdagradOptions& o, std::size_t t, std::int64_t i) {
  double w = all.weight(t, i), h = 0.0;
  for (int k = 0; k < kIterations; ++k) {
    const double g = all.gradient(t, i, k) + o.weight_decay * w;
    h += g * g;
    w -= o.lr * g / (std::sqrt(h) + o.eps);
  }
  return w;
}

double sgd(const ManyElements& all, const SgdOptions& o, std::size_t t, std::int64_t i) {
  double w = all.weight(t, i), buffer = 0.0;
  for (int k = 0; k < kIterations; ++k) {
    const double g = all.gradient(t, i, k);
    buffer = k == 0 ? g : o.momentum * buffer + g;
    w = rounded(w - o.lr * buffer, all.dtype());
  }
  return w;
}

class FusedOptimizers : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, FusedOptimizers, testing::ValuesIn(test::devices()),
                         test::device_name);

void check_adam(const AdamOptions& options, std::int64_t elements, DType dtype, Device device) {
  const ManyElements all({{elements}}, dtype, device);
  FusedAdam optimizer(all.parameters(), options);
  all.train(optimizer, kIterations);
  expect_fused(
      all.compare([&](std::size_t t, std::int64_t i) { return adam(all, options, t, i); }, dtype));
}

TEST_P(FusedOptimizers, AdamFloat) {
  check_adam({.lr = 5e-4, .adamw = false}, kElements, DType::f32, GetParam());
  check_adam({.lr = 5e-4, .adamw = true}, kElements, DType::f32, GetParam());
}
TEST_P(FusedOptimizers, AdamHalf) {
  check_adam({.lr = 5e-4, .adamw = false}, kElements, DType::f16, GetParam());
}
TEST_P(FusedOptimizers, AdamBfloat16) {
  check_adam({.lr = 5e-4, .adamw = false}, kElements, DType::bf16, GetParam());
}
TEST_P(FusedOptimizers, AdamOption) {
  check_adam({.lr = 0.01, .beta1 = 0.6, .beta2 = 0.9, .eps = 3e-6, .adamw = false}, 1, DType::f32,
             GetParam());
}

TEST_P(FusedOptimizers, AdamWithAnEmptyGroupAndAFrozenParameter) {
  const ManyElements all({{kElements}, {100}}, DType::f32, GetParam());
  NamedTensors parameters = all.parameters();
  parameters[1].tensor.set_requires_grad(false);
  const AdamOptions options{.lr = 5e-4};
  FusedAdam optimizer({{{}, 5e-4, 0.0}, {parameters, 5e-4, 0.0}}, options);
  all.train(optimizer, kIterations);
  expect_fused(all.compare(
      [&](std::size_t t, std::int64_t i) {
        return t == 1 ? all.weight(t, i) : adam(all, options, t, i);
      },
      DType::f32));
}

TEST_P(FusedOptimizers, AdagradFloat) {
  const AdagradOptions options{.lr = 5e-4, .eps = 1e-8, .weight_decay = 1e-5};
  const ManyElements all({{kElements}}, DType::f32, GetParam());
  FusedAdagrad optimizer(all.parameters(), options);
  all.train(optimizer, kIterations);
  expect_fused(all.compare(
      [&](std::size_t t, std::int64_t i) { return adagrad(all, options, t, i); }, DType::f32));
}

TEST(FusedOptimizersSizes, AdagradManyParameters) {
  const AdagradOptions options{.lr = 5e-4, .weight_decay = 0.0};
  for (const Device device : test::fast_devices()) {
    const ManyElements all(kManySizes, DType::f32, device);
    FusedAdagrad optimizer(all.parameters(), options);
    all.train(optimizer, kIterations);
    expect_fused(all.compare(
        [&](std::size_t t, std::int64_t i) { return adagrad(all, options, t, i); }, DType::f32));
  }
}

TEST_P(FusedOptimizers, AdagradOption) {
  const AdagradOptions options{.lr = 0.01, .eps = 3e-6, .weight_decay = 0.0};
  const ManyElements all({{1}}, DType::f32, GetParam());
  FusedAdagrad optimizer(all.parameters(), options);
  all.train(optimizer, kIterations);
  expect_fused(all.compare(
      [&](std::size_t t, std::int64_t i) { return adagrad(all, options, t, i); }, DType::f32));
}

TEST_P(FusedOptimizers, SgdFloatAndHalf) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    const SgdOptions options{.lr = 0.25, .momentum = 0.125};
    const ManyElements all({{kElements}}, dtype, GetParam());
    FusedSGD optimizer(all.parameters(), options);
    optimizer.set_master_weights(false);
    all.train(optimizer, kIterations);
    expect_fused(
        all.compare([&](std::size_t t, std::int64_t i) { return sgd(all, options, t, i); }, dtype));
  }
}

/// Apex throws for parameters on different devices, and needs the current device to be theirs.
TEST(FusedOptimizersOnDevices, AnyDeviceIsFineAndSoAreSeveralTogether) {
  ASSERT_TRUE(kTwoDevices);
  const Device first = Device::parse("cpu:0"), second = Device::parse("cpu:1");
  const SgdOptions options{.lr = 0.25, .momentum = 0.125};
  const ManyElements here({{kElements}}, DType::f32, first),
      there({{kElements}}, DType::f32, second);
  NamedTensors both = here.parameters();
  both.push_back({"there", there.parameters()[0].tensor});
  FusedSGD optimizer(both, options);
  for (int k = 0; k < kIterations; ++k) {
    here.write_gradients(k);
    there.write_gradients(k);
    EXPECT_TRUE(optimizer.step().applied);
  }
  for (const ManyElements* all : {&here, &there}) {
    expect_fused(all->compare(
        [&](std::size_t t, std::int64_t i) { return sgd(*all, options, t, i); }, DType::f32));
  }
}

}  // namespace
}  // namespace cairn::conformance
