#include "cairn/kernels/loss.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/core/stream.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using ::testing::HasSubstr;

using test::message_of;

DType loss_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
double loss_epsilon(DType dtype) {
  return std::min(epsilon(dtype), epsilon(DType::f32));
}

struct LossRows {
  std::vector<double> loss, lse, p;
};

LossRows reference(const std::vector<double>& x, const std::vector<std::int64_t>& target,
                   std::int64_t classes, const CrossEntropyOptions& o) {
  LossRows r;
  for (std::size_t i = 0; i < target.size(); ++i) {
    const double* row = x.data() + static_cast<std::int64_t>(i) * classes;
    double top = -1e300, sum = 0.0, plain = 0.0;
    for (std::int64_t j = 0; j < classes; ++j) top = std::max(top, row[j]);
    for (std::int64_t j = 0; j < classes; ++j) sum += std::exp(row[j] - top), plain += row[j];
    const double lse = top + std::log(sum), s = o.label_smoothing;
    r.lse.push_back(lse);
    r.loss.push_back(target[i] == o.ignore_index
                         ? 0.0
                         : (1 - s) * (lse - row[target[i]]) +
                               s * (lse - plain / static_cast<double>(classes)));
    for (std::int64_t j = 0; j < classes; ++j) r.p.push_back(std::exp(row[j] - lse));
  }
  return r;
}

std::vector<double> gradient(const LossRows& rows, const std::vector<std::int64_t>& target,
                             const std::vector<double>& dloss, std::int64_t classes,
                             const CrossEntropyOptions& o) {
  std::vector<double> dx(rows.p.size(), 0.0);
  for (std::size_t k = 0; k < dx.size(); ++k) {
    const std::size_t i = k / static_cast<std::size_t>(classes);
    if (target[i] == o.ignore_index) continue;
    double q = o.label_smoothing / static_cast<double>(classes);
    if (static_cast<std::int64_t>(k) % classes == target[i]) q += 1 - o.label_smoothing;
    dx[k] = dloss[i] * (rows.p[k] - q);
  }
  return dx;
}

struct LossCase {
  std::int64_t rows, classes;
  CrossEntropyOptions options;
};
const LossCase kLossCases[] = {{0, 5, {}},
                               {1, 1, {}},
                               {7, 10, {}},
                               {7, 10, {.ignore_index = 3, .label_smoothing = 0.1}},
                               {5, 1031, {.label_smoothing = 0.2}},
                               {3, 5003, {.ignore_index = -1}}};

std::vector<std::int64_t> targets(const LossCase& c) {
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < c.rows; ++i)
    all.push_back(i % 3 == 2 ? c.options.ignore_index : i * 7 % c.classes);
  return all;
}

class CrossEntropy : public testing::TestWithParam<Device> {};

TEST_P(CrossEntropy, LossAndGradientMatchTheReferenceInEveryDtypeAndLayout) {
  for (const LossCase& c : kLossCases) {
    const Shape shape{c.rows, c.classes};
    const auto labels = targets(c);
    const Tensor target = Tensor::from(labels, {c.rows}, DType::i64, GetParam());
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, dtype, layout));
        const LaidOut x(random_values(shape.numel(), 1, -9, 9), shape, dtype, GetParam(), layout);
        const Tensor loss = Tensor::empty({c.rows}, loss_dtype(dtype), GetParam()),
                     lse = Tensor::empty_like(loss);
        cross_entropy(x, target, loss, lse, c.options);
        const LossRows expected = reference(x.values(), labels, c.classes, c.options);
        expect_close(loss, expected.loss, 8 * loss_epsilon(dtype), 60 * loss_epsilon(dtype));
        expect_close(lse, expected.lse, 4 * loss_epsilon(dtype), 16 * loss_epsilon(dtype));

        const auto dloss = random_values(c.rows, 2);
        const Tensor scale = Tensor::from(dloss, {c.rows}, loss_dtype(dtype), GetParam());
        const LaidOut dx(shape, dtype, GetParam(), layout);
        cross_entropy_backward(x, target, lse, scale, dx, c.options);
        expect_close(dx.values(),
                     gradient(expected, labels, scale.to_vector(), c.classes, c.options),
                     8 * epsilon(dtype) + 40 * loss_epsilon(dtype), 4 * loss_epsilon(dtype));
        EXPECT_TRUE(dx.gaps_untouched());
      }
    }
  }
}

TEST_P(CrossEntropy, TakesRepeatedLossGradientsAndOverwritesLogits) {
  const Shape shape{4, 300};
  const std::vector<std::int64_t> labels{0, 299, 7, 7};
  const Tensor x =
      Tensor::from(random_values(shape.numel(), 3, -4, 4), shape, DType::f32, GetParam());
  const Tensor target = Tensor::from(labels, {4}, DType::i64, GetParam());
  const Tensor loss = Tensor::empty({4}, DType::f32, GetParam()), lse = Tensor::empty_like(loss);
  cross_entropy(x, target, loss, lse, {});
  const LossRows rows = reference(x.to_vector(), labels, 300, {});
  const Tensor quarter = Tensor::full({1}, 0.25, DType::f32, GetParam());
  cross_entropy_backward(x, target, lse, quarter.view().expand({4}), x, {});
  expect_close(x, gradient(rows, labels, std::vector<double>(4, 0.25), 300, {}), 1e-5, 1e-8);
}

TEST_P(CrossEntropy, OfSlicesOfTheClassesHasTheWholesGradient) {
  const std::int64_t rows = 7, classes = 1031;
  const CrossEntropyOptions options{.ignore_index = 3, .label_smoothing = 0.1};
  const LossCase c{rows, classes, options};
  const Tensor target = Tensor::from(targets(c), {rows}, DType::i64, GetParam());
  for (DType dtype : kFloating) {
    const auto values = random_values(rows * classes, 1, -9, 9);
    const Tensor x = Tensor::from(values, {rows, classes}, dtype, GetParam());
    const Tensor loss = Tensor::empty({rows}, loss_dtype(dtype), GetParam()),
                 lse = Tensor::empty_like(loss), whole = Tensor::empty_like(x),
                 sliced = Tensor::empty_like(x);
    cross_entropy(x, target, loss, lse, options);
    cross_entropy_backward(x, target, lse, loss, whole, options);
    for (std::int64_t begin = 0, end = 0; begin < classes; begin = end) {
      end = std::min(classes, begin + 400);
      cross_entropy_backward(x.view().slice(1, begin, end), target, lse, loss,
                             sliced.view().slice(1, begin, end), options,
                             ClassSlice{begin, classes});
    }
    EXPECT_EQ(sliced.to_vector(), whole.to_vector()) << core::name(dtype);
  }
  const Tensor x = Tensor::zeros({rows, 4}, DType::f32, GetParam());
  const Tensor lse = Tensor::zeros({rows}, DType::f32, GetParam());
  EXPECT_THAT(message_of([&] {
                cross_entropy_backward(x, target, lse, lse, x, {}, ClassSlice{1028, classes});
              }),
              HasSubstr("expected logits of classes among 1031, got 4 from class 1028"));
}

TEST_P(CrossEntropy, HugeLogitsAndMaskedClassesStayFinite) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x =
      Tensor::from(std::vector<double>{3e38, -3e38, 0, -inf, 1, 2}, {2, 3}, DType::f32, GetParam());
  const Tensor target = Tensor::from(std::vector<std::int64_t>{0, 2}, {2}, DType::i64, GetParam());
  const Tensor loss = Tensor::empty({2}, DType::f32, GetParam()), lse = Tensor::empty_like(loss);
  cross_entropy(x, target, loss, lse, {});
  expect_close(loss, {0.0, std::log1p(std::exp(-1.0))}, 1e-6, 0);
}

TEST(CrossEntropyTargets, OutOfRangeNamesRowAndValue) {
  const Tensor x = Tensor::zeros({3, 4}), loss = Tensor::empty({3}), lse = Tensor::empty({3});
  const Tensor target = Tensor::from(std::vector<std::int64_t>{1, -100, 4}, {3});
  const std::string expected = "expected targets in 0..3 or -100 (ignored), got 4 in row 2";
  EXPECT_EQ(message_of([&] { cross_entropy(x, target, loss, lse, {}); }),
            "[cross_entropy] " + expected);
  EXPECT_EQ(message_of([&] { cross_entropy_backward(x, target, lse, loss, x, {}); }),
            "[cross_entropy_backward] " + expected);

  const core::Stream stream = core::Stream::create({});
  {
    const core::StreamGuard guard(stream);
    cross_entropy(x, target, loss, lse, {});  // fails in the stream's thread
  }
  EXPECT_EQ(message_of([&] { stream.synchronize(); }), "[cross_entropy] " + expected);
}

TEST_P(CrossEntropy, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({3, 4}, DType::f32, GetParam()),
               row = Tensor::empty({3}, DType::f32, GetParam());
  const Tensor target = Tensor::zeros({3}, DType::i64, GetParam());
  const auto call = [&](const TensorView& logits, const TensorView& t, const TensorView& loss,
                        double smoothing) {
    return message_of([&] { cross_entropy(logits, t, loss, row, {.label_smoothing = smoothing}); });
  };
  EXPECT_EQ(call(row, target, row, 0),
            "[cross_entropy] expected logits of 2 dimensions, got shape [3]");
  EXPECT_EQ(call(x, row, row, 0), "[cross_entropy] expected target of dtype i64, got f32");
  EXPECT_EQ(call(x, Tensor::zeros({2}, DType::i64, GetParam()), row, 0),
            "[cross_entropy] expected target of shape [3], got [2]");
  EXPECT_EQ(call(x, target, Tensor::zeros({3}, DType::f16, GetParam()), 0),
            "[cross_entropy] expected loss of dtype f32, got f16");
  EXPECT_EQ(call(x, target, row, 2), "[cross_entropy] expected label_smoothing in [0, 1], got 2");
}

INSTANTIATE_TEST_SUITE_P(Devices, CrossEntropy, testing::ValuesIn(test::devices()),
                         test::device_name);

class PairLoss : public testing::TestWithParam<Device> {};

TEST_P(PairLoss, MseAndBceMatchTheReferenceInEveryDtypeAndLayout) {
  for (const Shape& shape : {Shape{}, Shape{0}, Shape{9, 77}, Shape{2, 3, 4, 5}}) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, dtype, layout));
        const LaidOut x(random_values(shape.numel(), 1, -9, 9), shape, dtype, GetParam(), layout);
        const LaidOut t(random_values(shape.numel(), 2, 0, 1), shape, dtype, GetParam(),
                        Layout::row_major);
        const LaidOut dloss(random_values(shape.numel(), 3), shape, loss_dtype(dtype), GetParam(),
                            layout);
        const LaidOut loss(shape, loss_dtype(dtype), GetParam(), layout),
            dx(shape, dtype, GetParam(), layout);
        const auto xs = x.values(), ts = t.values(), gs = dloss.values();
        std::vector<double> square(xs), square_dx(xs), bce(xs), bce_dx(xs);
        for (std::size_t i = 0; i < xs.size(); ++i) {
          square[i] = (xs[i] - ts[i]) * (xs[i] - ts[i]);
          square_dx[i] = 2 * (xs[i] - ts[i]) * gs[i];
          bce[i] = std::max(xs[i], 0.0) - xs[i] * ts[i] + std::log1p(std::exp(-std::abs(xs[i])));
          bce_dx[i] = (1 / (1 + std::exp(-xs[i])) - ts[i]) * gs[i];
        }
        const double fine = loss_epsilon(dtype), coarse = 2 * epsilon(dtype) + 8 * fine;
        mse(x, t, loss);
        expect_close(loss.values(), square, 8 * fine, 8 * fine);
        mse_backward(x, t, dloss, dx);
        expect_close(dx.values(), square_dx, coarse, 8 * fine);
        bce_with_logits(x, t, loss);
        expect_close(loss.values(), bce, 8 * fine, 16 * fine);
        bce_with_logits_backward(x, t, dloss, dx);
        expect_close(dx.values(), bce_dx, coarse, 8 * fine);
        EXPECT_TRUE(loss.gaps_untouched() && dx.gaps_untouched());
      }
    }
  }
}

TEST_P(PairLoss, BceIsStableForLargeLogits) {
  const Tensor x =
      Tensor::from(std::vector<double>{1000, -1000, 1000, -1000}, {4}, DType::f32, GetParam());
  const Tensor t = Tensor::from(std::vector<double>{1, 0, 0, 1}, {4}, DType::f32, GetParam());
  const Tensor loss = Tensor::empty({4}, DType::f32, GetParam());
  bce_with_logits(x, t, loss);
  expect_close(loss, {0, 0, 1000, 1000}, 1e-6, 1e-30);
  bce_with_logits_backward(x, t, Tensor::full({1}, 1.0, DType::f32, GetParam()), loss);
  expect_close(loss, {0, 0, 1, -1}, 1e-6, 1e-30);
}

TEST_P(PairLoss, BceOfProbabilitiesMatchesTheReferenceInEveryDtypeAndLayout) {
  for (const Shape& shape : {Shape{0}, Shape{9, 77}, Shape{2, 3, 4, 5}}) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, dtype, layout));
        const LaidOut p(random_values(shape.numel(), 1, 0.01, 0.99), shape, dtype, GetParam(),
                        layout);
        const LaidOut t(random_values(shape.numel(), 2, 0, 1), shape, dtype, GetParam(),
                        Layout::row_major);
        const LaidOut dloss(random_values(shape.numel(), 3), shape, loss_dtype(dtype), GetParam(),
                            layout);
        const LaidOut loss(shape, loss_dtype(dtype), GetParam(), layout),
            dp(shape, dtype, GetParam(), layout);
        const auto ps = p.values(), ts = t.values(), gs = dloss.values();
        std::vector<double> expected(ps), gradient(ps);
        for (std::size_t i = 0; i < ps.size(); ++i) {
          expected[i] = -ts[i] * std::log(ps[i]) - (1 - ts[i]) * std::log1p(-ps[i]);
          gradient[i] = (ps[i] - ts[i]) / (ps[i] * (1 - ps[i])) * gs[i];
        }
        const double fine = loss_epsilon(dtype);
        bce(p, t, loss);
        expect_close(loss.values(), expected, 16 * fine, 16 * fine);
        bce_backward(p, t, dloss, dp);
        expect_close(dp.values(), gradient, 2 * epsilon(dtype) + 16 * fine, 16 * fine);
        EXPECT_TRUE(loss.gaps_untouched() && dp.gaps_untouched());
      }
    }
  }
}

TEST_P(PairLoss, BceOfProbabilitiesHasLimitsAtItsEnds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto tensor = [](const std::vector<double>& values) {
    return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, DType::f32, GetParam());
  };
  const Tensor p = tensor({0, 1, 0, 1, 1e-20, -0.5, 1.5, nan}),
               t = tensor({0, 1, 1, 0, 0, 1, 0, 1});
  const Tensor loss = Tensor::empty({8}, DType::f32, GetParam());
  bce(p, t, loss);
  expect_close(loss, {0, 0, 100, 100, 1e-20, nan, nan, nan}, 1e-6, 0);
  bce_backward(p, t, Tensor::full({1}, 1.0, DType::f32, GetParam()), loss);
  const std::vector<double> dp = loss.to_vector();
  expect_close({dp.begin(), dp.begin() + 5}, {0, 0, -1e12, 1e12, 1e-8}, 1e-6, 0);
}

TEST_P(PairLoss, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({3}, DType::f16, GetParam());
  EXPECT_EQ(message_of([&] { mse(x, x, x); }), "[mse] expected loss of dtype f32, got f16");
  EXPECT_EQ(message_of([&] { bce_with_logits(x, Tensor::zeros({4}, DType::f16, GetParam()), x); }),
            "[bce_with_logits] expected target of shape [3] like x, got [4]");
}

INSTANTIATE_TEST_SUITE_P(Devices, PairLoss, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
