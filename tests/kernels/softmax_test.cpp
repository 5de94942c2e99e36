#include "cairn/kernels/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;

const SoftmaxOptions kOptions[] = {{},
                                   {.scale = 0.3},
                                   {.scale = -2.0},
                                   {.log = true},
                                   {.log = true, .scale = 0.5},
                                   {.causal = true, .scale = 0.7},
                                   {.log = true, .causal = true}};
const Shape kSoftmaxShapes[] = {{1},     {5},    {0, 4},        {3, 0},
                                {4, 65}, {6, 3}, {2, 3, 5, 37}, {3, 2100}};

using Lengths = std::vector<std::int64_t>;  // empty: all columns

std::int64_t visible(const Shape& shape, std::int64_t row, bool causal, const Lengths& lengths) {
  std::int64_t n = shape.back();
  if (!lengths.empty()) n = lengths[static_cast<std::size_t>(row / (shape.numel() / n / shape[0]))];
  if (!causal) return n;
  const std::int64_t rows = shape[shape.dims() - 2];
  return std::max<std::int64_t>(0, std::min(n, row % rows + shape.back() - rows + 1));
}

/// Some of every kind: all columns, none, one.
Lengths lengths_of(const Shape& shape) {
  Lengths lengths;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    const std::int64_t columns = shape.back(), some[] = {columns / 2, 0, columns, 1};
    lengths.push_back(some[i % 4]);
  }
  return lengths;
}

std::int64_t rows_of(const Shape& shape) {
  return shape.numel() / std::max<std::int64_t>(1, shape.back());
}

std::vector<double> forward(const std::vector<double>& x, const Shape& shape,
                            const SoftmaxOptions& o, const Lengths& lengths) {
  std::vector<double> y(x.size(), o.log ? -std::numeric_limits<double>::infinity() : 0.0);
  for (std::int64_t row = 0; row < rows_of(shape); ++row) {
    const std::int64_t n = visible(shape, row, o.causal, lengths), start = row * shape.back();
    double top = -1e300, sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i)
      top = std::max(top, o.scale * x[static_cast<std::size_t>(start + i)]);
    for (std::int64_t i = 0; i < n; ++i)
      sum += std::exp(o.scale * x[static_cast<std::size_t>(start + i)] - top);
    for (std::int64_t i = 0; i < n; ++i) {
      const double log_p = o.scale * x[static_cast<std::size_t>(start + i)] - top - std::log(sum);
      y[static_cast<std::size_t>(start + i)] = o.log ? log_p : std::exp(log_p);
    }
  }
  return y;
}

std::vector<double> backward(const std::vector<double>& y, const std::vector<double>& dy,
                             const Shape& shape, const SoftmaxOptions& o, const Lengths& lengths) {
  std::vector<double> dx(y.size(), 0.0);
  for (std::int64_t row = 0; row < rows_of(shape); ++row) {
    const std::int64_t n = visible(shape, row, o.causal, lengths), start = row * shape.back();
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto k = static_cast<std::size_t>(start + i);
      sum += o.log ? dy[k] : dy[k] * y[k];
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const auto k = static_cast<std::size_t>(start + i);
      dx[k] = o.scale * (o.log ? dy[k] - std::exp(y[k]) * sum : y[k] * (dy[k] - sum));
    }
  }
  return dx;
}

class Softmax : public testing::TestWithParam<Device> {
 protected:
  /// f(shape, options, lengths) for all that go together; options hold the lengths as well.
  template <class F>
  static void for_each_case(const F& f) {
    for (const Shape& shape : kSoftmaxShapes) {
      for (const SoftmaxOptions& options : kOptions) {
        if (options.causal && shape.dims() < 2) continue;
        f(shape, options, Lengths());
        if (shape.dims() < 2) continue;
        const Lengths lengths = lengths_of(shape);
        const Tensor there = Tensor::from(std::vector<double>(lengths.begin(), lengths.end()),
                                          {shape[0]}, DType::i64, GetParam());
        SoftmaxOptions cut = options;
        cut.lengths = there;
        f(shape, cut, lengths);
      }
    }
  }
};

TEST_P(Softmax, MatchesTheReferenceInEveryDtypeAndLayout) {
  for_each_case([](const Shape& shape, const SoftmaxOptions& options, const Lengths& lengths) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, dtype, layout));
        const LaidOut x(random_values(shape.numel(), 1, -5, 5), shape, dtype, GetParam(), layout);
        const LaidOut y(shape, dtype, GetParam(), layout);
        softmax(x, y, options);
        expect_close(
            y.values(), forward(x.values(), shape, options, lengths), 6 * epsilon(dtype),
            options.log ? 20 * std::min(epsilon(dtype), epsilon(DType::f32)) : epsilon(dtype));
        EXPECT_TRUE(y.gaps_untouched());
      }
    }
  });
}

TEST_P(Softmax, GradientMatchesTheReferenceInEveryDtypeAndLayout) {
  for_each_case([](const Shape& shape, const SoftmaxOptions& options, const Lengths& lengths) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, dtype, layout));
        const auto x = random_values(shape.numel(), 2, -3, 3);
        const LaidOut y(forward(x, shape, options, lengths), shape, dtype, GetParam(), layout);
        const LaidOut dy(random_values(shape.numel(), 3), shape, dtype, GetParam(), layout);
        const LaidOut dx(shape, dtype, GetParam(), layout);
        softmax_backward(y, dy, dx, options);
        expect_close(dx.values(), backward(y.values(), dy.values(), shape, options, lengths),
                     8 * epsilon(dtype), 40 * std::min(epsilon(dtype), epsilon(DType::f32)));
        EXPECT_TRUE(dx.gaps_untouched());
      }
    }
  });
}

TEST_P(Softmax, SurvivesLargeLogitsAndWorksInPlace) {
  const Tensor x = Tensor::from(std::vector<double>{1e4, 1e4 - 1, -1e4, 3e38, 0, -3e38}, {2, 3},
                                DType::f32, GetParam());
  softmax(x, x);
  const double p = 1 / (1 + std::exp(-1.0));
  expect_close(x, {p, 1 - p, 0, 1, 0, 0}, 1e-6, 1e-30);

  const Tensor y = Tensor::from(random_values(60, 4), {4, 15}, DType::bf16, GetParam());
  const Tensor apart = Tensor::empty_like(y),
               dy = Tensor::from(random_values(60, 5), {4, 15}, DType::bf16, GetParam());
  softmax(y, apart);
  softmax(y, y);
  EXPECT_EQ(y.to_vector(), apart.to_vector());
  softmax_backward(y, dy, apart);
  softmax_backward(y, dy, dy);
  EXPECT_EQ(dy.to_vector(), apart.to_vector());
}

TEST_P(Softmax, TheLargestIsThatOfTheScaledOnes) {
  const Tensor x = Tensor::from(std::vector<double>{200, 0}, {1, 2}, DType::f32, GetParam());
  softmax(x, x, {.scale = -1});
  expect_close(x, {0, 1}, 1e-6, 1e-30);
}

// Of a half result the nearest to the value, or one as near but for the f32 behind it.
TEST_P(Softmax, HalfResultsAreRoundedOnce) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor x = Tensor::from(random_values(900, 6, -2, 2), {30, 30}, dtype, GetParam());
    const Tensor y = Tensor::empty_like(x);
    softmax(x, y);
    const auto expected = forward(x.to_vector(), {30, 30}, {}, {}), got = y.to_vector();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double unit = std::ldexp(2 * epsilon(dtype), std::ilogb(expected[i]));
      ASSERT_LE(std::abs(got[i] - expected[i]), 0.501 * unit) << i;
    }
  }
}

TEST_P(Softmax, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({3}, DType::f32, GetParam());
  EXPECT_EQ(message_of([&] { softmax(x, x, {.causal = true}); }),
            "[softmax] expected at least 2 dimensions (causal), got shape [3]");
  EXPECT_EQ(message_of([&] { softmax(x, Tensor::zeros({4}, DType::f32, GetParam())); }),
            "[softmax] expected y of shape [3] like x, got [4]");
  const Tensor rows = Tensor::zeros({2, 3}, DType::f32, GetParam());
  const auto cut = [&](const Tensor& lengths) {
    return message_of([&] { softmax(rows, rows, {.lengths = lengths}); });
  };
  EXPECT_EQ(cut(Tensor::zeros({3}, DType::i64, GetParam())),
            "[softmax] expected lengths of shape [2], got [3]");
  EXPECT_EQ(cut(Tensor::zeros({2}, DType::f32, GetParam())),
            "[softmax] expected lengths of dtype i64, got f32");
  EXPECT_EQ(
      message_of([&] { softmax(x, x, {.lengths = Tensor::zeros({3}, DType::i64, GetParam())}); }),
      "[softmax] expected at least 2 dimensions (lengths), got shape [3]");
}

INSTANTIATE_TEST_SUITE_P(Devices, Softmax, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
