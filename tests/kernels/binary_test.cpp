#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cairn/kernels/elementwise.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::rounded;

struct Operation {
  BinaryOp op;
  double (*f)(double, double);
};

const Operation kArithmetic[] = {
    {BinaryOp::add, [](double a, double b) { return a + b; }},
    {BinaryOp::sub, [](double a, double b) { return a - b; }},
    {BinaryOp::mul, [](double a, double b) { return a * b; }},
    {BinaryOp::maximum, [](double a, double b) { return std::max(a, b); }},
    {BinaryOp::minimum, [](double a, double b) { return std::min(a, b); }},
};
const Operation kFractions[] = {
    {BinaryOp::div, [](double a, double b) { return a / b; }},
    {BinaryOp::pow, [](double a, double b) { return std::pow(a, b); }},
    {BinaryOp::atan2, [](double a, double b) { return std::atan2(a, b); }},
    {BinaryOp::add_relu, [](double a, double b) { return std::max(a + b, 0.0); }},
    {BinaryOp::mask, [](double a, double b) { return b != 0 ? a : 0.0; }},
};
const Operation kComparisons[] = {
    {BinaryOp::eq, [](double a, double b) { return double(a == b); }},
    {BinaryOp::ne, [](double a, double b) { return double(a != b); }},
    {BinaryOp::lt, [](double a, double b) { return double(a < b); }},
    {BinaryOp::le, [](double a, double b) { return double(a <= b); }},
    {BinaryOp::gt, [](double a, double b) { return double(a > b); }},
    {BinaryOp::ge, [](double a, double b) { return double(a >= b); }},
};

std::vector<double> apply(const Operation& operation, const std::vector<double>& a,
                          const std::vector<double>& b) {
  std::vector<double> y(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) y[i] = operation.f(a[i], b[i]);
  return y;
}

class Binary : public testing::TestWithParam<Device> {};

TEST_P(Binary, FloatArithmeticMatchesTheReferenceInEveryDtypeAndLayout) {
  for (const Shape& shape :
       {Shape{}, Shape{0, 4}, Shape{13}, Shape{6, 77}, Shape{2, 3, 5, 7}, Shape{33000}}) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, dtype, layout));
        const LaidOut a(random_values(shape.numel(), 1, 0.5, 4), shape, dtype, GetParam(), layout);
        const LaidOut b(random_values(shape.numel(), 2, 0.5, 4), shape, dtype, GetParam(),
                        Layout::row_major);
        const LaidOut y(shape, dtype, GetParam(), layout);
        const auto check = [&](const Operation& operation) {
          binary(operation.op, a, b, y);
          expect_close(y.values(), apply(operation, a.values(), b.values()), 4 * epsilon(dtype),
                       4 * epsilon(dtype));
          EXPECT_TRUE(y.gaps_untouched());
        };
        for (const Operation& operation : kArithmetic) check(operation);
        for (const Operation& operation : kFractions) check(operation);
      }
    }
  }
}

TEST_P(Binary, BroadcastsEitherOperand) {
  struct Case {
    Shape a, b, y;
  };
  const Case cases[] = {{{4, 70}, {70}, {4, 70}},
                        {{4, 70}, {4, 1}, {4, 70}},
                        {{}, {3, 5}, {3, 5}},
                        {{2, 1, 5}, {3, 1}, {2, 3, 5}},
                        {{1, 6, 1, 1}, {2, 6, 3, 4}, {2, 6, 3, 4}},
                        {{5, 1}, {1, 9}, {5, 9}},
                        {{0, 3}, {3}, {0, 3}}};
  for (const Case& c : cases) {
    for (DType dtype : {DType::f32, DType::bf16, DType::i64}) {
      const Tensor a = Tensor::from(random_values(c.a.numel(), 3, 1, 50), c.a, dtype, GetParam());
      const Tensor b = Tensor::from(random_values(c.b.numel(), 4, 1, 50), c.b, dtype, GetParam());
      const auto wide_a = a.alias(a.view().expand(c.y)).to_vector(),
                 wide_b = b.alias(b.view().expand(c.y)).to_vector();
      for (Layout layout : layouts(c.y)) {
        SCOPED_TRACE(describe(c.y, dtype, layout));
        const LaidOut y(c.y, dtype, GetParam(), layout);
        binary(BinaryOp::sub, a, b, y);
        EXPECT_EQ(y.values(), rounded(apply(kArithmetic[1], wide_a, wide_b), dtype));
      }
    }
  }
}

TEST_P(Binary, IntegersAndBooleansAreExact) {
  for (DType dtype : {DType::i16, DType::i32, DType::i64, DType::u8, DType::boolean}) {
    const Shape shape{3, 41};
    const LaidOut a(random_values(shape.numel(), 5, 0, 12), shape, dtype, GetParam(),
                    Layout::row_major);
    const LaidOut b(random_values(shape.numel(), 6, 0, 12), shape, dtype, GetParam(),
                    Layout::transposed);
    for (const Operation& operation : kArithmetic) {
      const LaidOut y(shape, dtype, GetParam(), Layout::row_major);
      binary(operation.op, a, b, y);
      auto expected = apply(operation, a.values(), b.values());
      if (dtype == DType::u8) {
        for (double& v : expected) v = std::fmod(v + 256, 256);  // wraps around
      }
      EXPECT_EQ(y.values(), rounded(expected, dtype)) << core::name(dtype);
    }
  }
}

TEST_P(Binary, ComparisonsGiveBooleansOrOnesAndZeros) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i16, DType::i32,
                      DType::i64, DType::u8, DType::boolean}) {
    const Shape shape{7, 30};
    auto values = random_values(shape.numel(), 7, 0, 4);
    for (double& v : values) v = std::floor(v);
    const LaidOut a(values, shape, dtype, GetParam(), Layout::sliced);
    std::reverse(values.begin(), values.end());
    const LaidOut b(values, shape, dtype, GetParam(), Layout::row_major);
    for (const Operation& operation : kComparisons) {
      for (DType result : {DType::boolean, dtype}) {
        const LaidOut y(shape, result, GetParam(), Layout::row_major);
        binary(operation.op, a, b, y);
        EXPECT_EQ(y.values(), apply(operation, a.values(), b.values())) << core::name(dtype);
      }
    }
  }
}

TEST_P(Binary, NanWinsMaximumAndMinimum) {
  const double nan = std::nan("");
  const Tensor a = Tensor::from(std::vector<double>{nan, 1, 2}, {3}, DType::f32, GetParam());
  const Tensor b = Tensor::from(std::vector<double>{1, nan, 3}, {3}, DType::f32, GetParam());
  const Tensor y = Tensor::empty_like(a);
  binary(BinaryOp::maximum, a, b, y);
  expect_close(y, {nan, nan, 3}, 0, 0);
  binary(BinaryOp::minimum, a, b, y);
  expect_close(y, {nan, nan, 2}, 0, 0);
}

TEST_P(Binary, ResultMayReplaceAnOperand) {
  const Tensor a = Tensor::from(random_values(999, 8), {999}, DType::bf16, GetParam());
  const Tensor b = Tensor::from(random_values(999, 9), {999}, DType::bf16, GetParam());
  const Tensor y = Tensor::empty_like(a);
  binary(BinaryOp::sub, a, b, y);
  binary(BinaryOp::sub, a, b, b);
  EXPECT_EQ(b.to_vector(), y.to_vector());
}

TEST_P(Binary, AffineAxpbyAndPowersMatchTheReferenceAcrossDtypes) {
  const Shape shape{3, 43};
  for (DType from : kFloating) {
    for (DType to : kFloating) {
      for (Layout layout : layouts(shape)) {
        SCOPED_TRACE(describe(shape, from, layout) + " to " + std::string(core::name(to)));
        const double eps =
            4 * std::max(epsilon(to), from == DType::f64 || to == DType::f64 ? epsilon(to)
                                                                             : epsilon(DType::f32));
        const LaidOut x(random_values(shape.numel(), 10), shape, from, GetParam(), layout);
        const LaidOut y(random_values(shape.numel(), 11), shape, to, GetParam(), Layout::sliced);
        const auto before = y.values();
        axpby(0.5, x, -2.0, y);
        auto expected = x.values();
        for (std::size_t i = 0; i < expected.size(); ++i)
          expected[i] = 0.5 * expected[i] - 2.0 * before[i];
        expect_close(y.values(), expected, eps, eps);
        affine(x, 3.0, -1.0, y);
        expected = x.values();
        for (double& v : expected) v = 3.0 * v - 1.0;
        expect_close(y.values(), expected, eps, eps);
        EXPECT_TRUE(y.gaps_untouched());
      }
    }
  }
  for (DType dtype : kFloating) {
    for (double exponent : {2.0, 3.0, -1.0, 0.5, -0.5, 0.0, 1.0, 2.5}) {
      const LaidOut x(random_values(shape.numel(), 12, 0.5, 3), shape, dtype, GetParam(),
                      Layout::transposed);
      const LaidOut y(shape, dtype, GetParam(), Layout::row_major);
      pow_scalar(x, exponent, y);
      auto expected = x.values();
      for (double& v : expected) v = std::pow(v, exponent);
      expect_close(y.values(), expected, 4 * epsilon(dtype), 4 * epsilon(dtype),
                   core::str("exponent ", exponent));
    }
  }
}

TEST_P(Binary, AxpbyWithoutTheOldValueDoesNotReadIt) {
  const Tensor x = Tensor::full({5}, 2.0, DType::f32, GetParam());
  const Tensor y = Tensor::full({5}, std::nan(""), DType::f32, GetParam());
  axpby(3.0, x, 0.0, y);
  EXPECT_EQ(y.to_vector(), std::vector<double>(5, 6.0));
}

TEST_P(Binary, ErrorsNameWhatIsWrong) {
  const Tensor f = Tensor::zeros({2, 3}, DType::f32, GetParam()),
               h = Tensor::zeros({2, 3}, DType::f16, GetParam());
  const Tensor n = Tensor::zeros({2, 3}, DType::i32, GetParam());
  EXPECT_EQ(message_of([&] { binary(BinaryOp::add, f, h, f); }),
            "[binary] expected b of dtype f32 like a, got f16");
  EXPECT_EQ(message_of([&] { binary(BinaryOp::add, f, f, h); }),
            "[binary] expected y of dtype f32 like a, got f16");
  EXPECT_EQ(message_of([&] { binary(BinaryOp::div, n, n, n); }),
            "[binary] expected a of dtype f16, bf16, f32 or f64, got i32");
  EXPECT_EQ(
      message_of([&] { binary(BinaryOp::add, Tensor::zeros({4}, DType::f32, GetParam()), f, f); }),
      "[binary] expected a of a shape that broadcasts to [2, 3], got [4]");
  EXPECT_EQ(message_of([&] { affine(n, 1, 0, f); }),
            "[affine] expected x of dtype f16, bf16, f32 or f64, got i32");
}

INSTANTIATE_TEST_SUITE_P(Devices, Binary, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
