#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using testing::error_of;
using testing::expect_close;
using testing::leaf;
using testing::random_tensor;

Tensor f32(const Shape& shape, unsigned seed) {
  return random_tensor(shape, seed, 0.1, 1, DType::f32);
}
Tensor f32_leaf(const Shape& shape, unsigned seed) {
  return leaf(shape, seed, 0.1, 1, DType::f32);
}

class Autocast : public ::testing::TestWithParam<DType> {};

TEST_P(Autocast, RunsProductsInHalf) {
  const AutocastGuard autocast(true, GetParam());
  const Tensor x = f32({4, 4}, 1), w = f32({4, 4}, 2), b = f32({4}, 3);
  EXPECT_EQ(matmul(x, w).dtype(), GetParam());
  EXPECT_EQ(linear(x, w, b).dtype(), GetParam());
  const Tensor image = f32({1, 2, 4, 4}, 1), filter = f32({2, 2, 3, 3}, 2);
  EXPECT_EQ(conv2d(image, filter).dtype(), GetParam());
  EXPECT_EQ(conv_transpose2d(image, filter).dtype(), GetParam());
  EXPECT_EQ(self_attention(f32({1, 3, 6}, 1), 1, true).dtype(), GetParam());
}

/// Counts the conversions of backward passes.
class BackwardCasts : public ScopedObserver {
 public:
  int count = 0;

 private:
  void on_end(const OpEvent& event) override {
    if (event.phase == Phase::backward && std::string(event.name) == "cast") ++count;
  }
};

// A product writes the gradient of a weight that autocast made half where the weight's own f32
// gradient lies: no half gradient, no cast after it, and no rounding between the two.
TEST_P(Autocast, AWeightGradientLandsInItsF32Slot) {
  const Tensor x = f32({8, 16}, 1), g = f32({8, 4}, 5), arena = Tensor::full({64}, 77.0);
  const Tensor w = f32_leaf({4, 16}, 2);
  w.gradient_slot().place(arena.alias(arena.view().reshape({4, 16})));
  const auto step = [&] {
    const AutocastGuard autocast(true, GetParam());
    const Tensor y = linear(x, w, Tensor());
    backward(y, to(g, GetParam()));
  };
  const BackwardCasts casts;
  step();
  EXPECT_EQ(casts.count, 0);
  std::vector<double> expected(64, 0.0);  // of the operands as they are in half, in double
  const auto a = to(g, GetParam()).to_vector(), b = to(x, GetParam()).to_vector();
  for (std::size_t n = 0; n < 8; ++n) {
    for (std::size_t o = 0; o < 4; ++o) {
      for (std::size_t i = 0; i < 16; ++i) expected[o * 16 + i] += a[n * 4 + o] * b[n * 16 + i];
    }
  }
  expect_close(w.grad(), expected, 1e-6);
  EXPECT_EQ(w.grad().raw_data(), arena.raw_data());
  step();  // adds
  for (double& value : expected) value *= 2;
  expect_close(w.grad(), expected, 1e-6);
}

// Used twice in one region, once by an operation that cannot write there: both parts arrive.
TEST_P(Autocast, AWeightGradientThatLandsInPartIsWhole) {
  const Tensor x = f32({2, 4}, 1), arena = Tensor::full({16}, 77.0);
  const Tensor w = f32_leaf({4, 4}, 2);
  w.gradient_slot().place(arena.alias(arena.view().reshape({4, 4})));
  {
    const AutocastGuard autocast(true, GetParam());
    const Tensor half = to(w, GetParam());
    backward(sum(matmul(x, half)) + sum(half * 2.0));
  }
  const std::vector<double> rows = to(x, GetParam()).to_vector();
  std::vector<double> expected;
  for (std::size_t i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) expected.push_back(rows[i] + rows[4 + i] + 2.0);
  }
  expect_close(w.grad(), expected, 2e-2);
}

TEST_P(Autocast, RunsSumsNormsLossesAndExponentialsInF32) {
  const AutocastGuard autocast(true, GetParam());
  const Tensor x = to(f32({4, 4}, 1), GetParam()), w = f32({4}, 2);
  for (const Tensor& y :
       {exp(x), log(x), pow(x, 2.0), sum(x), mean(x), softmax(x), log_softmax(x),
        layer_norm(x, w, w), rms_norm(x, w), mse_loss(x, f32({4, 4}, 2)),
        bce_with_logits(x, f32({4, 4}, 2)), cross_entropy(x, Tensor::zeros({4}, DType::i64))}) {
    EXPECT_EQ(y.dtype(), DType::f32);
  }
}

TEST_P(Autocast, LeavesOthersAsTheyComeAndPromotesMixedOperands) {
  const AutocastGuard autocast(true, GetParam());
  const Tensor half = to(f32({1, 2, 4, 4}, 1), GetParam()), wide = f32({1, 2, 4, 4}, 2);
  EXPECT_EQ(relu(half).dtype(), GetParam());
  EXPECT_EQ(relu(wide).dtype(), DType::f32);
  EXPECT_EQ(max_pool2d(half).dtype(), GetParam());
  EXPECT_EQ(batch_norm(half, f32({2}, 1), f32({2}, 1), {}, {}).dtype(), GetParam());
  EXPECT_EQ(reshape(half, {32}).dtype(), GetParam());
  EXPECT_EQ((half + half).dtype(), GetParam());
  EXPECT_EQ((half + wide).dtype(), DType::f32);
  EXPECT_EQ(concat({half, wide}).dtype(), DType::f32);
}

TEST_P(Autocast, LeavesF64Alone) {
  const AutocastGuard autocast(true, GetParam());
  EXPECT_EQ(matmul(random_tensor({2, 2}, 1), random_tensor({2, 2}, 2)).dtype(), DType::f64);
}

TEST_P(Autocast, GradientsOfF32LeavesAreF32) {
  const Tensor x = f32_leaf({3, 4}, 1), w = f32_leaf({5, 4}, 2), b = f32_leaf({5}, 3);
  Tensor loss;
  {
    const AutocastGuard autocast(true, GetParam());
    loss = sum(linear(x, w, b));
  }
  backward(loss);
  for (const Tensor& leaf : {x, w, b}) EXPECT_EQ(leaf.grad().dtype(), DType::f32);
  expect_close(b.grad(), {3, 3, 3, 3, 3}, 1e-6);
  std::vector<double> columns(4, 0.0), expected;
  const std::vector<double> rounded = to(x.detach(), GetParam()).to_vector();
  for (std::size_t i = 0; i < rounded.size(); ++i) columns[i % 4] += rounded[i];
  for (int row = 0; row < 5; ++row) expected.insert(expected.end(), columns.begin(), columns.end());
  expect_close(w.grad(), expected, GetParam() == DType::f16 ? 1e-3 : 8e-3);
}

INSTANTIATE_TEST_SUITE_P(Halves, Autocast, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(core::name(info.param)); });

TEST(AutocastRegion, NestsAndEnds) {
  const Tensor x = f32({2, 2}, 1);
  {
    const AutocastGuard outer(true, DType::bf16);
    {
      const AutocastGuard off(false);
      EXPECT_EQ(matmul(x, x).dtype(), DType::f32);
    }
    EXPECT_EQ(matmul(x, x).dtype(), DType::bf16);
    const AutocastGuard inner(true, DType::f16);
    EXPECT_EQ(matmul(x, x).dtype(), DType::f16);
  }
  EXPECT_EQ(matmul(x, x).dtype(), DType::f32);
  EXPECT_THAT(error_of([] { AutocastGuard guard(true, DType::f32); }), ::testing::HasSubstr("f32"));
}

// Counts operations by name.
class Counter : public OpObserver {
 public:
  Counter() : previous_(set_observer(this)) {}
  ~Counter() override { set_observer(previous_); }
  void end(const OpEvent& event) override { ++count[event.name]; }
  std::map<std::string, int> count;

 private:
  OpObserver* previous_;
};

TEST(CastCache, CastsALeafOnceARegion) {
  const Tensor w = f32_leaf({2, 2}, 1), x = to(f32({2, 2}, 2), DType::f16);
  Counter counter;
  for (int region = 1; region <= 2; ++region) {
    const AutocastGuard autocast(true);
    for (int i = 0; i < 3; ++i) matmul(x, w);
    EXPECT_EQ(counter.count["cast"], region);
  }
  const AutocastGuard uncached(true, DType::f16, /*cache=*/false);
  for (int i = 0; i < 3; ++i) matmul(x, w);
  EXPECT_EQ(counter.count["cast"], 5);
}

TEST(CastCache, SeesWritesToTheLeaf) {
  const Tensor w = f32_leaf({1, 1}, 1), x = Tensor::full({1, 1}, 1.0);
  const AutocastGuard autocast(true);
  matmul(x, w);
  kernels::fill(w, 4.0);
  EXPECT_EQ(matmul(x, w).item(), 4.0);
  Tensor handle = w;
  handle.set_data(Tensor::full({1, 1}, 8.0));
  EXPECT_EQ(matmul(x, w).item(), 8.0);
}

TEST(CastCache, AnEvaluationInsideARegionDoesNotCutTheGraph) {
  const Tensor w = f32_leaf({1, 1}, 1), x = Tensor::full({1, 1}, 2.0);
  const AutocastGuard autocast(true);
  {
    const NoGradGuard no_grad;
    EXPECT_FALSE(matmul(x, w).requires_grad());
  }
  const Tensor y = matmul(x, w);
  ASSERT_TRUE(y.requires_grad());
  {
    const NoGradGuard no_grad;
    EXPECT_FALSE(matmul(x, w).requires_grad());
  }
  backward(sum(y));
  expect_close(w.grad(), {2.0}, 0);
}

TEST(CastCache, ServesSeveralBackwardsInOneRegion) {
  const Tensor w = f32_leaf({1, 1}, 1), x = Tensor::full({1, 1}, 2.0);
  const AutocastGuard autocast(true);
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) backward(sum(matmul(x, w)));
  expect_close(w.grad(), {6.0}, 0);
}

TEST(CastCache, ACapturedStateDoesNotKeepTheCopies) {
  const Tensor w = f32_leaf({64, 64}, 1), x = to(f32({1, 64}, 2), DType::f16);
  ThreadState state;
  const NoGradGuard no_grad;
  const std::size_t before = core::memory_stats(core::default_device()).current_total;
  {
    const AutocastGuard autocast(true);
    matmul(x, w);
    EXPECT_GT(core::memory_stats(core::default_device()).current_total, before);
    state = ThreadState::capture();
  }
  EXPECT_EQ(core::memory_stats(core::default_device()).current_total, before);
  EXPECT_TRUE(state.autocast.enabled);
}

TEST(ThreadStates, AreCapturedAndRestoredWhole) {
  manual_seed(11);
  Generator::current().next();
  ThreadState inside;
  {
    const AutocastGuard autocast(true, DType::bf16);
    const NoGradGuard no_grad;
    inside = ThreadState::capture();
    manual_seed(0);
  }
  {
    const ThreadStateGuard guard(inside);
    EXPECT_FALSE(grad_enabled());
    EXPECT_TRUE(autocast_state().enabled);
    EXPECT_EQ(autocast_state().dtype, DType::bf16);
    EXPECT_EQ(Generator::current().seed(), 11u);
    EXPECT_EQ(Generator::current().offset(), 1u);
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_FALSE(autocast_state().enabled);
  EXPECT_EQ(Generator::current().seed(), 0u);
}

}  // namespace
}  // namespace cairn::autograd
