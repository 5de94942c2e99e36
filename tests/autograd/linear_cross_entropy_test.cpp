// linear_cross_entropy against what it fuses: cross_entropy(linear()).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "cairn/autograd/autocast.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/matmul.h"
#include "gradient_check.h"
#include "support/cpu_only.h"
#include "support/near.h"

namespace cairn::autograd {
namespace {

using test::expect_near_largest;
using testing::check_gradients;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;
using testing::strided_leaf;

/// Targets 0..V-1, every fifth of them ignored.
Tensor targets(const Shape& shape, std::int64_t V, unsigned seed, std::int64_t ignored = -100) {
  std::mt19937 draw(seed);
  std::vector<std::int64_t> classes;
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const auto drawn = static_cast<std::int64_t>(draw() % static_cast<unsigned>(V));
    classes.push_back(draw() % 5 == 0 ? ignored : drawn);
  }
  return Tensor::from(classes, shape);
}

struct Outcome {
  std::vector<double> loss, dx, dweight, dbias;
};

Outcome outcome(const Tensors& leaves, const Tensor& loss, double seed = 1.0) {
  backward(sum(loss) * seed);
  Outcome o{loss.to_vector()};
  std::vector<double>* const into[] = {&o.dx, &o.dweight, &o.dbias};
  for (std::size_t i = 0; i < 3; ++i) {
    if (!leaves[i].defined() || !leaves[i].requires_grad()) continue;
    *into[i] = leaves[i].grad().to_vector();
    leaves[i].gradient_slot().clear();
  }
  return o;
}

/// Sums of as many terms, rounded in another order.
void expect_outcome_near(const Outcome& got, const Outcome& expected, double tolerance) {
  expect_near_largest(got.loss, expected.loss, tolerance, 0, "loss");
  expect_near_largest(got.dx, expected.dx, tolerance, 0, "dx");
  expect_near_largest(got.dweight, expected.dweight, tolerance, 0, "dweight");
  expect_near_largest(got.dbias, expected.dbias, tolerance, 0, "dbias");
}

TEST(LinearCrossEntropy, HasTheGradientsOfItsFormula) {
  const Tensor target = targets({2, 3}, 7, 1);
  for (const bool recompute : {false, true}) {
    for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
      const auto f = [&](const Tensors& x) {
        return linear_cross_entropy(x[0], x[1], x[2], target,
                                    {.reduction = reduction, .label_smoothing = 0.1}, recompute);
      };
      check_gradients(f, {leaf({2, 3, 4}, 1), leaf({7, 4}, 2), leaf({7}, 3)});
      check_gradients(f, {leaf({2, 3, 4}, 1), strided_leaf({7, 4}, 2), Tensor()});
      check_gradients(f, {random_tensor({2, 3, 4}, 1), leaf({7, 4}, 2), Tensor()});
      check_gradients(f, {leaf({2, 3, 4}, 1), random_tensor({7, 4}, 2), leaf({7}, 3)});
    }
  }
}

// Shapes, options and dtypes as drawn; vocabularies of 60,000 make chunks of 70 or 140 rows, and
// slices of 20,000 to 50,000 classes.
TEST(LinearCrossEntropy, IsCrossEntropyOfLinear) {
  std::mt19937 draw(10);
  const auto below = [&](unsigned n) { return static_cast<std::int64_t>(draw() % n); };
  const int every = core::default_device().is_cpu() ? 5 : 20;  // a GPU's chunks hold all rows
  for (int i = 0; i < 40; ++i) {
    const bool chunks = i % every == 0;
    const std::int64_t N = (chunks ? 150 : 0) + below(chunks ? 50 : 200), C = 1 + below(9);
    const std::int64_t V = chunks ? 60000 + below(9) : 1 + below(60);
    const DType dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
    const DType dtype = dtypes[chunks ? i / 10 % 2 : below(4)];
    CrossEntropyOptions options{.reduction =
                                    chunks ? Reduction::mean : static_cast<Reduction>(below(3))};
    if (below(2) == 0) options.ignore_index = 0;
    if (below(2) == 0) options.label_smoothing = 0.2;
    const Tensor target = targets({N}, V, static_cast<unsigned>(i), options.ignore_index);
    const Tensors leaves{leaf({N, C}, draw(), -1, 1, dtype), leaf({V, C}, draw(), -2, 2, dtype),
                         !chunks && below(2) == 0 ? Tensor() : leaf({V}, draw(), -1, 1, dtype)};
    const bool recompute = chunks ? i / 5 % 2 == 1 : below(2) == 0;
    SCOPED_TRACE(core::str(leaves[0].shape()) + " V " + std::to_string(V) + " " +
                 std::string(core::name(dtype)) + (recompute ? " recompute" : "") + " reduction " +
                 std::to_string(static_cast<int>(options.reduction)));
    const double scale = dtype == DType::f16 ? 2048.0 : 3.0;  // plain gradients underflow in f16
    const Outcome expected = outcome(
        leaves, cross_entropy(linear(leaves[0], leaves[1], leaves[2]), target, options), scale);
    const Outcome got = outcome(
        leaves, linear_cross_entropy(leaves[0], leaves[1], leaves[2], target, options, recompute),
        scale);
    const double tolerance = dtype == DType::f64    ? 1e-12
                             : dtype == DType::f32  ? 2e-5
                             : dtype == DType::bf16 ? 2e-2
                                                    : 3e-3;
    expect_outcome_near(got, expected, tolerance);
    if (HasFatalFailure()) return;
  }
}

TEST(LinearCrossEntropy, AddsToGradientsThatAreThere) {
  const Tensor target = targets({150}, 60000, 1);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor x = leaf({150, 3}, 1, -1, 1, dtype), weight = leaf({60000, 3}, 2, -1, 1, dtype);
    for (const bool recompute : {false, true}) {
      const auto loss = [&] { return linear_cross_entropy(x, weight, {}, target, {}, recompute); };
      const Outcome once = outcome({x, weight, {}}, loss());
      backward(loss());
      const Outcome twice = outcome({x, weight, {}}, loss());
      for (std::size_t i = 0; i < once.dweight.size(); ++i) {
        ASSERT_NEAR(twice.dweight[i], 2 * once.dweight[i], 1e-7 + 1e-2 * std::abs(once.dweight[i]));
      }
    }
  }
}

TEST(LinearCrossEntropy, MayBeDifferentiatedTwiceWithARetainedGraph) {
  const Tensor x = leaf({5, 3}, 1), weight = leaf({9, 3}, 2), target = targets({5}, 9, 3);
  const Tensor loss = linear_cross_entropy(x, weight, {}, target);
  backward(loss, {}, {.retain_graph = true});
  const std::vector<double> once = weight.grad().to_vector();
  weight.gradient_slot().clear();
  backward(loss);
  EXPECT_EQ(weight.grad().to_vector(), once);
}

// 2.5e-7 of a probability is nothing in f16 after a mean over 5,000 rows, unless something scales
// it.
TEST(LinearCrossEntropy, KeepsSmallGradientsOfHalfLogits) {
  const std::int64_t N = 5000;
  const Tensor x = Tensor::full({N, 1}, 1.0, DType::f16), target = Tensor::zeros({N}, DType::i64);
  Tensor weight = Tensor::from(std::vector<double>{0.0, -15.2}, {2, 1}, DType::f16);
  weight.set_requires_grad(true);
  const double p = std::exp(weight.to_vector()[1]) / (1 + std::exp(weight.to_vector()[1]));
  backward(linear_cross_entropy(x, weight, {}, target) * 65536.0);
  EXPECT_NEAR(weight.grad().to_vector()[1], 65536 * p, 65536 * p * 0.02);
}

TEST(LinearCrossEntropy, EverythingIgnoredIsNaNAsAMeanAndHasNoGradient) {
  const Tensor target = Tensor::full({4}, -100, DType::i64);
  for (const bool recompute : {false, true}) {
    const Tensor x = leaf({4, 3}, 1), weight = leaf({6, 3}, 2);
    const Tensor loss = linear_cross_entropy(x, weight, {}, target, {}, recompute);
    EXPECT_TRUE(std::isnan(loss.item()));
    backward(loss);
    EXPECT_EQ(weight.grad().to_vector(), std::vector<double>(18, 0.0));
    EXPECT_EQ(x.grad().to_vector(), std::vector<double>(12, 0.0));
  }
}

TEST(LinearCrossEntropy, WithoutRowsHasGradientsOfZero) {
  const Tensor target = Tensor::zeros({0}, DType::i64);
  for (const bool recompute : {false, true}) {
    const Tensor x = leaf({0, 3}, 1), weight = leaf({4096, 3}, 2);
    const Tensor loss =
        linear_cross_entropy(x, weight, {}, target, {.reduction = Reduction::sum}, recompute);
    { const Tensor used = Tensor::full({4096, 3}, 7.0, DType::f64); }  // its memory is used again
    backward(loss);
    EXPECT_EQ(weight.grad().to_vector(), std::vector<double>(4096 * 3, 0.0));
  }
}

TEST(LinearCrossEntropy, RunsInHalfInAnAutocastRegion) {
  const Tensor x = leaf({6, 8}, 1, -1, 1, DType::f32), weight = leaf({11, 8}, 2, -1, 1, DType::f32);
  const Tensor target = targets({6}, 11, 1);
  const auto in_region = [&](auto f) {
    const AutocastGuard region(true, DType::bf16);
    return outcome({x, weight, {}}, f());
  };
  const Outcome expected = in_region([&] { return cross_entropy(linear(x, weight, {}), target); });
  const Outcome got = in_region([&] { return linear_cross_entropy(x, weight, {}, target); });
  expect_outcome_near(got, expected, 2e-2);
}

/// What `work` takes at most beside what lives before it.
template <class Work>
std::size_t peak_of(Work&& work) {
  const Device device = core::default_device();
  const std::size_t before = core::memory_stats(device).current_total;
  core::reset_peak_memory(device);
  work();
  return core::memory_stats(device).peak_total - before;
}

// The weight's gradient takes 15 MB, a sum of it in f32 would take 31. A bf16 product is one of f32
// copies on processors that have none.
TEST(LinearCrossEntropy, RecomputesWithoutASumBesideAHalfGradient) {
  const std::int64_t N = 64, V = 30000, C = 256;
  const Tensor x = leaf({N, C}, 1, -1, 1, DType::bf16), target = targets({N}, V, 1);
  const Tensor weight = leaf({V, C}, 2, -1, 1, DType::bf16);
  const Tensor loss = linear_cross_entropy(x, weight, {}, target, {}, /*recompute=*/true);
  std::size_t product = 0;  // what the one of its products takes that takes most
  {
    const Tensor logits = Tensor::zeros({N, V}, DType::bf16), dx = Tensor::empty({N, C});
    const Tensor dweight = Tensor::empty({V, C}, DType::bf16);
    const auto takes = [&](const TensorView& a, const TensorView& b, const TensorView& y) {
      product = std::max(product, peak_of([&] { kernels::matmul(a, b, y); }));
    };
    takes(x, weight.view().transpose(0, 1), logits);
    takes(logits, weight, dx);
    takes(logits.view().transpose(0, 1), x, dweight);
  }
  EXPECT_LE(peak_of([&] { backward(loss); }), product + (std::size_t{24} << 20));
}

// Beyond what the operands' gradients take, a chunk: the logits would be 96 MB.
TEST(LinearCrossEntropy, NeverHoldsTheLogits) {
  const std::int64_t N = 800, V = 30000, C = 8;
  const Tensor x = leaf({N, C}, 1, -1, 1, DType::f32), weight = leaf({V, C}, 2, -1, 1, DType::f32);
  const Tensor target = targets({N}, V, 1);
  const auto peak = [&](auto loss) {
    const std::size_t most = peak_of([&] { backward(loss()); });
    x.gradient_slot().clear(), weight.gradient_slot().clear();
    return most;
  };
  const auto fused = [&](bool recompute) {
    return peak([&] { return linear_cross_entropy(x, weight, {}, target, {}, recompute); });
  };
  const std::size_t plain = peak([&] { return cross_entropy(linear(x, weight, {}), target); });
  EXPECT_GE(plain, std::size_t{96} << 20 >> 1);
  if (!core::default_device().is_cpu()) return;  // a GPU's chunks hold all of these rows
  EXPECT_LE(fused(false), std::size_t{38} << 20);
  EXPECT_LE(fused(true), std::size_t{37} << 20);
}

TEST(LinearCrossEntropy, NamesWrongInputs) {
  CAIRN_CPU_ONLY("a GPU would have to be waited for");
  const Tensor x = random_tensor({4, 3}, 1), weight = random_tensor({6, 3}, 2);
  const auto message = [&](const Tensor& w, const Tensor& bias, const Tensor& target) {
    return error_of([&] { linear_cross_entropy(x, w, bias, target); });
  };
  const Tensor zeros = Tensor::zeros({4}, DType::i64);
  EXPECT_THAT(message({}, {}, zeros), HasSubstr("expected weight [V, C], got none"));
  EXPECT_THAT(message(random_tensor({6, 2}, 1), {}, zeros), HasSubstr("expected x [..., 2]"));
  EXPECT_THAT(message(weight, random_tensor({5}, 1), zeros), HasSubstr("expected bias [6]"));
  EXPECT_THAT(message(weight, {}, Tensor::zeros({5}, DType::i64)),
              HasSubstr("expected i64 targets of shape [4] for logits [4, 6]"));
  EXPECT_THAT(message(weight, {}, Tensor::full({4}, 6, DType::i64)), HasSubstr("6"));
}

}  // namespace
}  // namespace cairn::autograd
