// Gradients against central differences, in double.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/kernels/elementwise.h"
#include "support/tensors.h"

namespace cairn::autograd::testing {

using Function = std::function<Tensor(const Tensors&)>;

/// Values in [low, high), the same in every run.
inline std::vector<double> random_values(std::int64_t n, unsigned seed, double low = -1.0,
                                         double high = 1.0) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& value : values) value = uniform(engine);
  return values;
}

inline Tensor random_tensor(const Shape& shape, unsigned seed, double low = -1.0, double high = 1.0,
                            DType dtype = DType::f64) {
  return Tensor::from(random_values(shape.numel(), seed, low, high), shape, dtype);
}

/// A leaf that requires a gradient.
inline Tensor leaf(const Shape& shape, unsigned seed, double low = -1.0, double high = 1.0,
                   DType dtype = DType::f64) {
  return random_tensor(shape, seed, low, high, dtype).set_requires_grad(true);
}

/// A leaf of the shape whose elements do not lie in row-major order.
inline Tensor strided_leaf(const Shape& shape, unsigned seed) {
  Shape reversed;
  for (int i = shape.dims() - 1; i >= 0; --i) reversed.push_back(shape[i]);
  const Tensor data = random_tensor(reversed, seed);
  Shape order;
  for (int i = shape.dims() - 1; i >= 0; --i) order.push_back(i);
  return data.alias(data.view().permute(order)).set_requires_grad(true);
}

struct CheckOptions {
  double step = 1e-5;  // for f32 inputs: a power of two, and only where f is linear in each input
  double tolerance = 1e-7;  // absolute, plus relative to the value
};

inline double weighted_sum(const Tensor& y, const std::vector<double>& weights) {
  const std::vector<double> values = y.to_vector();
  double sum = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) sum += values[i] * weights[i];
  return sum;
}

/// Adds `change` to the element of a leaf (in row-major order).
inline void nudge(const Tensor& x, std::int64_t element, double change) {
  std::vector<double> values = x.to_vector();
  values[static_cast<std::size_t>(element)] += change;
  kernels::copy(Tensor::from(values, x.shape(), x.dtype(), x.device()), x);
}

/// Compares every gradient of sum(f(inputs) * random weights) with central differences.
inline void check_gradients(const Function& f, const Tensors& inputs, CheckOptions options = {}) {
  const Tensor y = f(inputs);
  const std::vector<double> weights = random_values(y.numel(), 99);
  ASSERT_TRUE(y.requires_grad());
  for (const Tensor& x : inputs) {
    if (x.defined()) Tensor(x).clear_grad();
  }
  backward(y, Tensor::from(weights, y.shape(), y.dtype()));
  const NoGradGuard no_grad;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& x = inputs[i];
    if (!x.defined() || !x.requires_grad()) continue;
    ASSERT_TRUE(x.grad().defined()) << "input " << i << " has no gradient";
    ASSERT_EQ(x.grad().shape(), x.shape());
    const std::vector<double> gradient = x.grad().to_vector();
    for (std::int64_t e = 0; e < x.numel(); ++e) {
      nudge(x, e, options.step);
      const double above = weighted_sum(f(inputs), weights);
      nudge(x, e, -2 * options.step);
      const double below = weighted_sum(f(inputs), weights);
      nudge(x, e, options.step);
      const double expected = (above - below) / (2 * options.step);
      const double got = gradient[static_cast<std::size_t>(e)];
      ASSERT_NEAR(got, expected, options.tolerance * (1.0 + std::abs(expected)))
          << "input " << i << ", element " << e;
    }
  }
}

inline void expect_close(const Tensor& got, const std::vector<double>& expected, double tolerance) {
  test::expect_close(got, expected, tolerance, tolerance);
}

/// The message of the error that f throws; fails where it throws none of type E.
template <class E = core::InvalidArgument, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace cairn::autograd::testing
