#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/core/parallel_for.h"
#include "cairn/kernels/elementwise.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;

/// x's shape with 1 in the dimensions whose bit is set.
Shape without(const Shape& x, unsigned bits) {
  Shape y = x;
  for (int d = 0; d < x.dims(); ++d) {
    if (bits >> d & 1u) y[d] = 1;
  }
  return y;
}

struct ReduceReference {
  std::vector<double> values, absolute;  // absolute: sums of |x|, what rounding is measured against
};

ReduceReference reference(ReductionKind op, const std::vector<double>& x, const Shape& shape,
                          const Shape& reduced) {
  const auto outputs = static_cast<std::size_t>(reduced.numel());
  const bool is_max = op == ReductionKind::max;
  ReduceReference r{
      std::vector<double>(outputs, is_max ? -std::numeric_limits<double>::infinity() : 0.0),
      std::vector<double>(outputs, 0.0)};
  const Strides strides = core::contiguous_strides(reduced);
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), at = 0;
    for (int d = shape.dims() - 1; d >= 0; --d) {
      if (reduced[d] != 1) at += rest % shape[d] * strides[d];
      rest /= shape[d];
    }
    double& y = r.values[static_cast<std::size_t>(at)];
    y = is_max ? std::max(y, x[i]) : y + x[i];
    r.absolute[static_cast<std::size_t>(at)] += std::abs(x[i]);
  }
  const double count = static_cast<double>(shape.numel()) /
                       static_cast<double>(std::max<std::int64_t>(1, reduced.numel()));
  if (op == ReductionKind::mean) {
    for (double& v : r.values) v /= count;
    for (double& v : r.absolute) v /= count;
  }
  return r;
}

class Reduce : public testing::TestWithParam<Device> {};

TEST_P(Reduce, AnyDimensionsOfAnyLayoutMatchTheReference) {
  const Shape shapes[] = {{},       {9},       {0, 5},        {5, 133},
                          {300, 7}, {3, 5, 7}, {2, 19, 5, 6}, {4, 1, 3, 2, 5}};
  for (const Shape& shape : shapes) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        const LaidOut x(random_values(shape.numel(), 1), shape, dtype, GetParam(), layout);
        for (unsigned bits = 0; bits < 1u << shape.dims(); ++bits) {
          const Shape reduced = without(shape, bits);
          SCOPED_TRACE(core::str(describe(shape, dtype, layout), " to ", reduced));
          for (ReductionKind op : {ReductionKind::sum, ReductionKind::mean, ReductionKind::max}) {
            if (op == ReductionKind::max && shape.numel() == 0) continue;
            if (op == ReductionKind::mean && shape.numel() == 0) continue;
            const LaidOut y(reduced, dtype, GetParam(), Layout::row_major);
            reduce(op, x, y);
            const ReduceReference expected = reference(op, x.values(), shape, reduced);
            const double largest =
                expected.absolute.empty()
                    ? 0
                    : *std::max_element(expected.absolute.begin(), expected.absolute.end());
            expect_close(y.values(), expected.values, 2 * epsilon(dtype),
                         op == ReductionKind::max
                             ? 0
                             : 4 * std::min(epsilon(dtype), epsilon(DType::f32)) * largest);
          }
        }
      }
    }
  }
}

TEST_P(Reduce, LongSumsKeepTheirDigits) {
  const Shape shape{3001, 1030};
  const auto values = random_values(shape.numel(), 2, 0, 1);
  for (DType dtype : {DType::f32, DType::bf16}) {
    const Tensor x = Tensor::from(values, shape, dtype, GetParam());
    for (unsigned bits : {1u, 2u, 3u}) {
      const Shape reduced = without(shape, bits);
      const Tensor y = Tensor::empty(reduced, DType::f32, GetParam());
      reduce(ReductionKind::sum, x, y);
      expect_close(y, reference(ReductionKind::sum, x.to_vector(), shape, reduced).values,
                   4 * epsilon(DType::f32), 0);
    }
  }
}

// 1.1 is rounded up at each step to a large sum in f32: 7e-4 of the whole.
TEST_P(Reduce, LongRowsOfEqualsDoNotDrift) {
  const std::int64_t n = 1 << 22;
  const Tensor x = Tensor::full({n}, 1.1, DType::f32, GetParam());
  const Tensor y = Tensor::empty({1}, DType::f32, GetParam());
  reduce(ReductionKind::sum, x, y);
  EXPECT_NEAR(y.to_vector()[0], n * static_cast<double>(1.1f), 3e-5 * n);
}

// A GPU's blocks, of two warps here, go on to a second row.
TEST_P(Reduce, MoreRowsThanBlocks) {
  const Shape shape{16'390, 260};
  const Tensor x = Tensor::from(random_values(shape.numel(), 6), shape, DType::f32, GetParam());
  const Tensor y = Tensor::empty({shape[0], 1}, DType::f32, GetParam());
  reduce(ReductionKind::sum, x, y);
  const auto expected = reference(ReductionKind::sum, x.to_vector(), shape, y.shape());
  expect_close(y, expected.values, 1e-6, 1e-5);
}

TEST_P(Reduce, AccumulatesIntoWhatIsThere) {
  const Tensor x = Tensor::from(random_values(40 * 30, 3), {40, 30}, DType::f16, GetParam());
  for (unsigned bits : {1u, 2u}) {
    const Shape reduced = without(x.shape(), bits);
    const Tensor y = Tensor::full(reduced, 10.0, DType::f32, GetParam());
    reduce(ReductionKind::sum, x, y, true);
    auto expected = reference(ReductionKind::sum, x.to_vector(), x.shape(), reduced).values;
    for (double& v : expected) v += 10.0;
    expect_close(y, expected, 1e-6, 0);
    kernels::fill(y, 10.0);
    reduce(ReductionKind::mean, x, y, true);
    expected = reference(ReductionKind::mean, x.to_vector(), x.shape(), reduced).values;
    for (double& v : expected) v += 10.0;
    expect_close(y, expected, 1e-6, 0);
  }
}

TEST_P(Reduce, SumsOfNothingAreZeroAndMaximaOfNothingAnError) {
  const Tensor x = Tensor::zeros({0, 3}, DType::f32, GetParam());
  const Tensor y = Tensor::full({1, 3}, 5.0, DType::f32, GetParam());
  reduce(ReductionKind::sum, x, y);
  EXPECT_EQ(y.to_vector(), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(message_of([&] { reduce(ReductionKind::max, x, y); }),
            "[reduce] expected elements to take the maximum of, got x of shape [0, 3]");
}

TEST_P(Reduce, MaximumPassesNanOn) {
  for (std::int64_t at : {0, 17, 99}) {
    auto values = random_values(100, 4);
    values[static_cast<std::size_t>(at)] = std::nan("");
    const Tensor x = Tensor::from(values, {100, 1}, DType::f32, GetParam());
    for (const TensorView& view : {x.view(), x.view().expand({100, 3})}) {
      const Tensor y = Tensor::empty({1, view.shape[1]}, DType::f32, GetParam());
      reduce(ReductionKind::max, view, y);
      for (double v : y.to_vector()) EXPECT_TRUE(std::isnan(v)) << at;
    }
  }
}

TEST_P(Reduce, CountsIntegersAndBooleans) {
  for (DType dtype : {DType::boolean, DType::u8, DType::i16, DType::i32, DType::i64}) {
    auto values = random_values(7 * 50, 5, 0, 2);
    for (double& v : values) v = std::floor(v);
    const LaidOut x(values, {7, 50}, dtype, GetParam(), Layout::row_major);
    const LaidOut y({7, 1}, DType::i64, GetParam(), Layout::row_major);
    const LaidOut z({1, 50}, DType::f32, GetParam(), Layout::row_major);
    reduce(ReductionKind::sum, x, y);
    reduce(ReductionKind::sum, x, z);
    EXPECT_EQ(y.values(), reference(ReductionKind::sum, values, {7, 50}, {7, 1}).values);
    EXPECT_EQ(z.values(), reference(ReductionKind::sum, values, {7, 50}, {1, 50}).values);
    const Tensor every_third = Tensor::zeros({7, 150}, dtype, GetParam());
    TensorView strided = every_third.view().slice(1, 0, 50);
    strided.strides[1] = 3;
    kernels::copy(x.view(), strided);
    reduce(ReductionKind::sum, strided, y);
    EXPECT_EQ(y.values(), reference(ReductionKind::sum, values, {7, 50}, {7, 1}).values);
  }
}

TEST(ReduceThreads, BitsDoNotDependOnTheirNumber) {
  const int before = core::num_threads();
  const Shape shape{2000, 300};
  const Tensor x = Tensor::from(random_values(shape.numel(), 6), shape, DType::f32);
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 5}) {
    core::set_num_threads(threads);
    std::vector<float> all;
    for (unsigned bits : {1u, 2u, 3u}) {
      const Tensor y = Tensor::empty(without(shape, bits));
      reduce(ReductionKind::sum, x, y);
      const auto values = y.to_vector<float>();
      all.insert(all.end(), values.begin(), values.end());
    }
    results.push_back(all);
  }
  core::set_num_threads(before);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(Reduce, ErrorsNameBothShapes) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, GetParam());
  EXPECT_EQ(message_of([&] {
              reduce(ReductionKind::sum, x, Tensor::zeros({2, 2}, DType::f32, GetParam()));
            }),
            "[reduce] expected y of x's shape [2, 3] with 1 in the reduced dimensions, got [2, 2]");
  EXPECT_EQ(message_of(
                [&] { reduce(ReductionKind::sum, x, Tensor::zeros({3}, DType::f32, GetParam())); }),
            "[reduce] expected y of 2 dimensions, got shape [3]");
}

INSTANTIATE_TEST_SUITE_P(Devices, Reduce, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
