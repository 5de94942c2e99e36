#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using kernels::BinaryOp;
using testing::check_gradients;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;
using testing::strided_leaf;

struct BinaryCase {
  const char* name;
  Tensor (*op)(const Tensor&, const Tensor&);
  double (*reference)(double, double);
};

class Binary : public ::testing::TestWithParam<BinaryCase> {};

TEST_P(Binary, HasTheValuesOfItsFormula) {
  const Tensor a = random_tensor({3, 5}, 1), b = random_tensor({3, 5}, 2, 0.5, 2.0);
  const std::vector<double> va = a.to_vector(), vb = b.to_vector();
  std::vector<double> expected;
  for (std::size_t i = 0; i < va.size(); ++i) {
    expected.push_back(GetParam().reference(va[i], vb[i]));
  }
  expect_close(GetParam().op(a, b), expected, 1e-14);
}

TEST_P(Binary, HasTheGradientsOfItsFormula) {
  const auto f = [](const Tensors& x) { return GetParam().op(x[0], x[1]); };
  check_gradients(f, {leaf({3, 5}, 1), leaf({3, 5}, 2, 0.5, 2.0)});
  check_gradients(f, {leaf({3, 5}, 1), leaf({5}, 2, 0.5, 2.0)});
  check_gradients(f, {leaf({2, 1, 3}, 1), leaf({4, 1}, 2, 0.5, 2.0)});
  check_gradients(f, {leaf({}, 1), leaf({7}, 2, 0.5, 2.0)});
  check_gradients(f, {strided_leaf({3, 4}, 1), leaf({3, 4}, 2, 0.5, 2.0)});
  check_gradients(f, {leaf({0, 3}, 1), leaf({3}, 2, 0.5, 2.0)});
}

TEST_P(Binary, AddsToGradientsThatAreThere) {
  const Tensor a = leaf({2, 3}, 1), b = leaf({3}, 2, 0.5, 2.0);
  backward(sum(GetParam().op(a, b)));
  std::vector<double> once_a = a.grad().to_vector(), once_b = b.grad().to_vector();
  backward(sum(GetParam().op(a, b)));
  for (double& v : once_a) v *= 2;
  for (double& v : once_b) v *= 2;
  expect_close(a.grad(), once_a, 1e-12);
  expect_close(b.grad(), once_b, 1e-12);
}

TEST_P(Binary, NamesShapesThatDoNotFit) {
  const std::string message = error_of([] {
    GetParam().op(random_tensor({2, 3}, 1), random_tensor({4}, 1));
  });
  EXPECT_THAT(message, HasSubstr(GetParam().name));
  EXPECT_THAT(message, HasSubstr("[2, 3]"));
  EXPECT_THAT(message, HasSubstr("[4]"));
}

INSTANTIATE_TEST_SUITE_P(
    Ops, Binary,
    ::testing::Values(
        BinaryCase{"add", add, [](double a, double b) { return a + b; }},
        BinaryCase{"sub", sub, [](double a, double b) { return a - b; }},
        BinaryCase{"mul", mul, [](double a, double b) { return a * b; }},
        BinaryCase{"div", div, [](double a, double b) { return a / b; }},
        BinaryCase{"atan2", atan2, [](double a, double b) { return std::atan2(a, b); }},
        BinaryCase{"maximum", maximum, [](double a, double b) { return std::max(a, b); }},
        BinaryCase{"minimum", minimum, [](double a, double b) { return std::min(a, b); }},
        BinaryCase{"add_relu", add_relu, [](double a, double b) { return std::max(a + b, 0.0); }}),
    [](const auto& info) { return info.param.name; });

TEST(Elementwise, MaximumSharesTheGradientOfEqualOperands) {
  Tensor a = Tensor::full({2}, 1.5, DType::f64), b = Tensor::full({2}, 1.5, DType::f64);
  a.set_requires_grad(true), b.set_requires_grad(true);
  backward(sum(maximum(a, b)));
  expect_close(a.grad(), {0.5, 0.5}, 0.0);
  expect_close(b.grad(), {0.5, 0.5}, 0.0);
}

TEST(Elementwise, MixedDtypesPromoteToTheWidestAndGradientsComeBackInTheirs) {
  const Tensor a = leaf({3}, 1, -1, 1, DType::f16), b = leaf({3}, 2, -1, 1, DType::f32);
  const Tensor y = a * b;
  EXPECT_EQ(y.dtype(), DType::f32);
  backward(sum(y));
  EXPECT_EQ(a.grad().dtype(), DType::f16);
  EXPECT_EQ(b.grad().dtype(), DType::f32);
  expect_close(b.grad(), a.to_vector(), 1e-6);
  EXPECT_EQ((random_tensor({2}, 1, -1, 1, DType::f16) + random_tensor({2}, 1, -1, 1, DType::bf16))
                .dtype(),
            DType::f32);
}

TEST(Elementwise, ComparesToBooleansWithoutAGradient) {
  const Tensor a = leaf({4}, 1), b = random_tensor({4}, 2);
  const Tensor less = compare(BinaryOp::lt, a, b);
  EXPECT_EQ(less.dtype(), DType::boolean);
  EXPECT_FALSE(less.requires_grad());
  const std::vector<double> va = a.to_vector(), vb = b.to_vector(), got = less.to_vector();
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(got[i] != 0.0, va[i] < vb[i]);
  EXPECT_THAT(error_of([&] { compare(BinaryOp::add, a, b); }), HasSubstr("compare"));
}

TEST(Elementwise, OperatorsAreTheOps) {
  check_gradients([](const Tensors& x) { return -(2.0 * x[0] + x[1] * 3.0 - 1.0) / 4.0 + 0.5; },
                  {leaf({3}, 1), leaf({3}, 2)});
  const Tensor x = random_tensor({2}, 1);
  const std::vector<double> v = x.to_vector();
  expect_close(-(2.0 * x - 1.0) / 4.0 + 0.5, {-(2 * v[0] - 1) / 4 + 0.5, -(2 * v[1] - 1) / 4 + 0.5},
               1e-14);
}

struct UnaryCase {
  const char* name;
  Tensor (*op)(const Tensor&);
  double (*reference)(double);
  double low, high;
};

class UnaryOps : public ::testing::TestWithParam<UnaryCase> {};

TEST_P(UnaryOps, HaveTheValuesOfTheirFormula) {
  const Tensor x = random_tensor({4, 7}, 3, GetParam().low, GetParam().high);
  std::vector<double> expected = x.to_vector();
  for (double& v : expected) v = GetParam().reference(v);
  expect_close(GetParam().op(x), expected, 1e-12);
}

TEST_P(UnaryOps, HaveTheGradientsOfTheirFormula) {
  const auto f = [](const Tensors& x) { return GetParam().op(x[0]); };
  const double low = GetParam().low, high = GetParam().high;
  check_gradients(f, {leaf({4, 7}, 3, low, high)});
  check_gradients(f, {leaf({}, 3, low, high)});
  check_gradients(f, {leaf({0}, 3, low, high)});
  const Tensor data = random_tensor({5, 3}, 4, low, high);
  check_gradients(f, {data.alias(data.view().transpose(0, 1)).set_requires_grad(true)});
}

TEST_P(UnaryOps, AreRoundedOnceInHalf) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor x = leaf({33}, 5, GetParam().low, GetParam().high, dtype);
    std::vector<double> expected = x.to_vector();
    for (double& v : expected) v = GetParam().reference(v);
    const Tensor y = GetParam().op(x);
    EXPECT_EQ(y.dtype(), dtype);
    expect_close(y, expected, dtype == DType::f16 ? 1e-3 : 8e-3);
    backward(y, Tensor::full({33}, 1.0, dtype));
    EXPECT_EQ(x.grad().dtype(), dtype);
  }
}

double gelu_exact(double x) {
  return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
}
double gelu_approximate(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

INSTANTIATE_TEST_SUITE_P(
    Ops, UnaryOps,
    ::testing::Values(
        UnaryCase{"exp", exp, [](double x) { return std::exp(x); }, -2, 2},
        UnaryCase{"log", log, [](double x) { return std::log(x); }, 0.2, 3},
        UnaryCase{"sqrt", sqrt, [](double x) { return std::sqrt(x); }, 0.2, 3},
        UnaryCase{"tanh", tanh, [](double x) { return std::tanh(x); }, -2, 2},
        UnaryCase{"sigmoid", sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, -3, 3},
        UnaryCase{"relu", relu, [](double x) { return x > 0 ? x : 0.0; }, -1, 1},
        UnaryCase{"leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0.1); },
                  [](double x) { return x > 0 ? x : 0.1 * x; }, -1, 1},
        UnaryCase{"gelu", [](const Tensor& x) { return gelu(x); }, gelu_exact, -3, 3},
        UnaryCase{"gelu_tanh", [](const Tensor& x) { return gelu(x, true); }, gelu_approximate, -3,
                  3},
        UnaryCase{"silu", silu, [](double x) { return x / (1 + std::exp(-x)); }, -3, 3},
        UnaryCase{"pow3", [](const Tensor& x) { return pow(x, 3.0); },
                  [](double x) { return x * x * x; }, -1, 1},
        UnaryCase{"pow_half", [](const Tensor& x) { return pow(x, -0.5); },
                  [](double x) { return 1 / std::sqrt(x); }, 0.3, 2},
        UnaryCase{"affine", [](const Tensor& x) { return affine(x, 2.5, -1.0); },
                  [](double x) { return 2.5 * x - 1.0; }, -1, 1}),
    [](const auto& info) { return info.param.name; });

TEST(Elementwise, PowersOfTensorsHaveTheirGradients) {
  const auto f = [](const Tensors& x) { return pow(x[0], x[1]); };
  check_gradients(f, {leaf({3, 4}, 1, 0.5, 2), leaf({3, 4}, 2, -2, 2)});
  check_gradients(f, {leaf({3, 4}, 1, 0.5, 2), leaf({4}, 2, -2, 2)});
  check_gradients(f, {leaf({}, 1, 0.5, 2), leaf({2, 3}, 2, -2, 2)});
  const Tensor base = Tensor::from(std::vector<double>{0, 0, 2}, {3}).set_requires_grad(true);
  const Tensor power = Tensor::from(std::vector<double>{2, 1, 3}, {3}).set_requires_grad(true);
  backward(sum(pow(base, power)));
  expect_close(base.grad(), {0, 1, 12}, 1e-14);
  expect_close(power.grad(), {0, 0, 8 * std::log(2.0)}, 1e-14);
  EXPECT_THAT(error_of([&] { pow(base, to(power, DType::f32)); }), HasSubstr("one dtype"));
}

TEST(Elementwise, APowerOfZeroHasNoGradientEverywhere) {
  Tensor x = Tensor::zeros({2}, DType::f64);
  x.set_requires_grad(true);
  backward(sum(pow(x, 0.0)));
  expect_close(x.grad(), {0, 0}, 0.0);
}

TEST(Elementwise, DropoutKeepsTheExpectedShareAndItsBackwardTheSameMask) {
  manual_seed(3);
  const Tensor x = Tensor::full({100, 100}, 1.0, DType::f64);
  Tensor(x).set_requires_grad(true);
  const Tensor y = dropout(x, 0.25);
  EXPECT_EQ(Generator::current().offset(), 1u);
  backward(sum(y));
  EXPECT_EQ(y.to_vector(), x.grad().to_vector());
  double kept = 0;
  for (double v : y.to_vector()) {
    EXPECT_TRUE(v == 0.0 || std::abs(v - 1.0 / 0.75) < 1e-12);
    kept += v != 0.0;
  }
  EXPECT_NEAR(kept / 1e4, 0.75, 0.02);
  manual_seed(3);
  EXPECT_EQ(dropout(x, 0.25).to_vector(), y.to_vector());
  EXPECT_NE(dropout(x, 0.25).to_vector(), y.to_vector());
}

TEST(Elementwise, DropoutOfNothingAndOfEverything) {
  const Tensor x = leaf({5}, 1);
  EXPECT_TRUE(dropout(x, 0.0).same(x));
  const Tensor y = dropout(x, 1.0);
  expect_close(y, {0, 0, 0, 0, 0}, 0.0);
  backward(sum(y));
  expect_close(x.grad(), {0, 0, 0, 0, 0}, 0.0);
  EXPECT_THAT(error_of([&] { dropout(x, 1.5); }), HasSubstr("1.5"));
}

TEST(Elementwise, AnUndefinedInputIsNamed) {
  EXPECT_THAT(error_of([] { relu(Tensor()); }), HasSubstr("relu"));
  EXPECT_THAT(error_of([] { add(Tensor(), Tensor()); }), HasSubstr("add"));
}

}  // namespace
}  // namespace cairn::autograd
