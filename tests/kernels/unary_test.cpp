#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "cairn/kernels/elementwise.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::rounded;
using testing::HasSubstr;

using Function = double (*)(double);

constexpr double kSlope = 0.125;

double unary_sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}
double cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double density(double x) {
  return std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI);
}
// (1 + tanh(u / 2)) / 2 is unary_sigmoid(u).
double tanh_argument(double x) {
  return 2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
}
double gelu_tanh(double x) {
  return 0.5 * x * (1.0 + std::tanh(0.5 * tanh_argument(x)));
}
double gelu_tanh_derivative(double x) {
  const double u = tanh_argument(x),
               du = 2.0 * std::sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
  return unary_sigmoid(u) * (1.0 + x * unary_sigmoid(-u) * du);
}

struct ActivationCase {
  const char* name;
  UnaryOp op;
  double low, high;  // inputs
  Function f, derivative;
};

const ActivationCase kUnaryActivations[] = {
    {"neg", UnaryOp::neg, -5, 5, [](double x) { return -x; }, [](double) { return -1.0; }},
    {"abs", UnaryOp::abs, -5, 5, [](double x) { return std::abs(x); },
     [](double x) { return x > 0 ? 1.0 : -1.0; }},
    {"exp", UnaryOp::exp, -8, 8, [](double x) { return std::exp(x); },
     [](double x) { return std::exp(x); }},
    {"log", UnaryOp::log, 0.01, 90, [](double x) { return std::log(x); },
     [](double x) { return 1 / x; }},
    {"sqrt", UnaryOp::sqrt, 0.01, 90, [](double x) { return std::sqrt(x); },
     [](double x) { return 0.5 / std::sqrt(x); }},
    {"rsqrt", UnaryOp::rsqrt, 0.25, 90, [](double x) { return 1 / std::sqrt(x); },
     [](double x) { return -0.5 / (x * std::sqrt(x)); }},
    {"tanh", UnaryOp::tanh, -4, 4, [](double x) { return std::tanh(x); },
     [](double x) { return 1 - std::tanh(x) * std::tanh(x); }},
    {"sigmoid", UnaryOp::sigmoid, -12, 12, unary_sigmoid,
     [](double x) { return unary_sigmoid(x) * (1 - unary_sigmoid(x)); }},
    {"relu", UnaryOp::relu, -5, 5, [](double x) { return std::max(x, 0.0); },
     [](double x) { return x > 0 ? 1.0 : 0.0; }},
    {"leaky_relu", UnaryOp::leaky_relu, -5, 5, [](double x) { return x > 0 ? x : kSlope * x; },
     [](double x) { return x > 0 ? 1.0 : kSlope; }},
    {"gelu", UnaryOp::gelu, -6, 6, [](double x) { return x * cdf(x); },
     [](double x) { return cdf(x) + x * density(x); }},
    {"gelu_tanh", UnaryOp::gelu_tanh, -6, 6, gelu_tanh, gelu_tanh_derivative},
    {"silu", UnaryOp::silu, -12, 12, [](double x) { return x * unary_sigmoid(x); },
     [](double x) { return unary_sigmoid(x) * (1 + x * unary_sigmoid(-x)); }},
    {"square", UnaryOp::square, -5, 5, [](double x) { return x * x; },
     [](double x) { return 2 * x; }},
};

const Shape kUnaryShapes[] = {{}, {0}, {1}, {7}, {3, 0, 2}, {5, 67}, {2, 3, 5, 7}, {40001}};

class Unary : public testing::TestWithParam<Device> {};

TEST_P(Unary, MatchesTheReferenceInEveryDtypeAndLayout) {
  for (const ActivationCase& a : kUnaryActivations) {
    for (DType dtype : kFloating) {
      for (const Shape& shape : kUnaryShapes) {
        for (Layout layout : test::layouts(shape)) {
          SCOPED_TRACE(core::str(a.name, " ", describe(shape, dtype, layout)));
          const auto values = random_values(shape.numel(), 1, a.low, a.high);
          const LaidOut x(values, shape, dtype, GetParam(), layout);
          const LaidOut y(shape, dtype, GetParam(), layout);
          unary(a.op, x, y, kSlope);
          std::vector<double> expected = x.values();
          for (double& v : expected) v = a.f(v);
          expect_close(y.values(), expected, 6 * epsilon(dtype), 6 * epsilon(dtype), a.name);
          EXPECT_TRUE(y.gaps_untouched());
        }
      }
    }
  }
}

TEST_P(Unary, GradientsMatchTheReferenceInEveryDtypeAndLayout) {
  for (const ActivationCase& a : kUnaryActivations) {
    for (DType dtype : kFloating) {
      for (const Shape& shape : kUnaryShapes) {
        for (Layout layout : test::layouts(shape)) {
          SCOPED_TRACE(core::str(a.name, " ", describe(shape, dtype, layout)));
          const auto x = rounded(random_values(shape.numel(), 2, a.low, a.high), dtype);
          const LaidOut dy(random_values(shape.numel(), 3), shape, dtype, GetParam(), layout);
          auto kept = x;
          if (saves_output(a.op)) {
            for (double& v : kept) v = a.f(v);
          }
          const LaidOut saved(kept, shape, dtype, GetParam(), Layout::row_major);
          const LaidOut dx(shape, dtype, GetParam(), layout);
          unary_backward(a.op, saved, dy, dx, kSlope);
          const auto gradient = dy.values();
          std::vector<double> expected(gradient.size());
          double steepest = 1.0;  // a saved output was rounded: so is what is computed from it
          for (std::size_t i = 0; i < expected.size(); ++i) {
            expected[i] = gradient[i] * a.derivative(x[i]);
            steepest = std::max(steepest, std::abs(expected[i]));
          }
          expect_close(dx.values(), expected, 6 * epsilon(dtype), 6 * steepest * epsilon(dtype),
                       a.name);
          EXPECT_TRUE(dx.gaps_untouched());
        }
      }
    }
  }
}

TEST_P(Unary, WorksInPlace) {
  for (const ActivationCase& a : kUnaryActivations) {
    const Tensor x =
        Tensor::from(random_values(1003, 4, a.low, a.high), {1003}, DType::f32, GetParam());
    const Tensor y = Tensor::empty_like(x), dx = Tensor::empty_like(x);
    unary(a.op, x, y, kSlope);
    unary_backward(a.op, x, y, dx, kSlope);
    unary_backward(a.op, x, y, y, kSlope);
    EXPECT_EQ(y.to_vector(), dx.to_vector()) << a.name;
    unary(a.op, x, dx, kSlope);
    unary(a.op, x, x, kSlope);
    EXPECT_EQ(x.to_vector(), dx.to_vector()) << a.name;
  }
}

TEST_P(Unary, TreatsInfinitiesNansAndExtremesAsTheMathematicsDoes) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const std::vector<double> x{inf, -inf, nan, 0.0, -0.0, 88.0, 89.0, -87.0, -100.0, 1e-40, 3e38};
  for (const ActivationCase& a : kUnaryActivations) {
    if (a.op == UnaryOp::gelu || a.op == UnaryOp::gelu_tanh || a.op == UnaryOp::silu) continue;
    const Tensor tensor =
        Tensor::from(x, {static_cast<std::int64_t>(x.size())}, DType::f32, GetParam());
    const Tensor y = Tensor::empty_like(tensor);
    unary(a.op, tensor, y, kSlope);
    std::vector<double> expected = rounded(x, DType::f32);
    for (double& v : expected) v = static_cast<float>(std::isnan(v) ? v : a.f(v));
    expect_close(y, expected, 1e-5, 1e-37, a.name);
  }
  const Tensor far =
      Tensor::from(std::vector<double>{40, 200, -40, -200, nan}, {5}, DType::f32, GetParam());
  for (UnaryOp op : {UnaryOp::gelu, UnaryOp::gelu_tanh, UnaryOp::silu}) {
    const Tensor y = Tensor::empty_like(far);
    unary(op, far, y);
    expect_close(y, {40, 200, 0, 0, nan}, 0, 1e-15);
  }
}

// Denormals to infinity and NaNs, of either sign, in steps of a thousandth of a binade: near 0,
// exp(2 |x|) - 1 would cancel; near 9, the result becomes 1.
TEST_P(Unary, TanhIsExactToThreeUnitsInTheLastPlace) {
  std::vector<float> inputs;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 8191)
    inputs.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  for (const float x :
       {0.0f, std::numeric_limits<float>::denorm_min(), 0.17328680f, 0.51986039f, 9.0f, 9.0109139f,
        9.0109148f, 10.0f, std::numeric_limits<float>::max(),
        std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    inputs.insert(inputs.end(), {x, -x});
  const Tensor x =
      Tensor::from(inputs, {static_cast<std::int64_t>(inputs.size())}, DType::f32, GetParam());
  const Tensor y = Tensor::empty_like(x);
  unary(UnaryOp::tanh, x, y);
  const std::vector<double> outputs = y.to_vector();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const double expected = std::tanh(static_cast<double>(inputs[i])), got = outputs[i];
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << got;
      continue;
    }
    const int exponent = expected == 0.0 ? -149 : std::max(std::ilogb(expected) - 23, -149);
    ASSERT_LE(std::abs(got - expected), std::ldexp(3.0, exponent)) << "of " << inputs[i];
    ASSERT_LE(std::abs(got), 1.0) << "of " << inputs[i];
    ASSERT_EQ(std::signbit(got), std::signbit(expected)) << "of " << inputs[i];
  }
}

TEST_P(Unary, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, GetParam());
  const auto call = [&](const TensorView& in, const TensorView& out) {
    return message_of([&] { unary(UnaryOp::exp, in, out); });
  };
  EXPECT_EQ(call(x, Tensor::zeros({3, 2}, DType::f32, GetParam())),
            "[unary] expected y of shape [2, 3] like x, got [3, 2]");
  EXPECT_EQ(call(x, Tensor::zeros({2, 3}, DType::f16, GetParam())),
            "[unary] expected y of dtype f32 like x, got f16");
  const Tensor counts = Tensor::zeros({2, 3}, DType::i64, GetParam());
  EXPECT_EQ(call(counts, counts), "[unary] expected x of dtype f16, bf16, f32 or f64, got i64");
  EXPECT_EQ(call(TensorView{}, x), "[unary] expected a defined x, got an undefined view");
  TensorView elsewhere = x;
  elsewhere.device.index = 5;
  EXPECT_THAT(call(x, elsewhere), HasSubstr("the device of x, got"));
}

INSTANTIATE_TEST_SUITE_P(Devices, Unary, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
