// Element-wise kernels and copies on views.
//
// Common rules of this folder (they hold for every header in it):
//  - Views may be strided and repeated (stride 0) on input; outputs must not overlap inputs unless a function says so.
//  - All views of a call live on one device; work is queued on that device's current stream, in order.
//  - Arithmetic is in f32 (f64 for f64); half inputs are widened, results rounded once.
//  - Wrong shapes, dtypes or devices throw core::InvalidArgument "[op] expected ..., got ..."; empty views are fine.
//  - "accumulate" adds the result to what the output holds; otherwise the output is overwritten.
#pragma once

#include <cstdint>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

void fill(const TensorView& y, double value);

/// y = x, converting the dtype; any two layouts of the same shape; across devices too. x broadcasts
/// to y's shape.
void copy(const TensorView& x, const TensorView& y);

enum class BinaryOp : std::uint8_t {
  add,
  sub,
  mul,
  div,
  pow,
  maximum,
  minimum,
  atan2,  // angle of the point (b, a): b to the right, a up
  eq,
  ne,
  lt,
  le,
  gt,
  ge
};
/// y = a op b with broadcasting to y's shape. a and b share one dtype; y has it too, or boolean for
/// comparisons. y may be a or b.
void binary(BinaryOp op, const TensorView& a, const TensorView& b, const TensorView& y);

enum class UnaryOp : std::uint8_t {
  neg,
  abs,
  exp,
  log,
  sqrt,
  rsqrt,
  tanh,
  sigmoid,
  relu,
  leaky_relu,
  gelu,
  gelu_tanh,
  silu,
  square
};
/// y = op(x). `slope` is leaky_relu's. gelu is the exact one (erf), gelu_tanh its tanh
/// approximation. y may be x.
void unary(UnaryOp op, const TensorView& x, const TensorView& y, double slope = 0.01);
/// dx = dy * op'(x), where `saved` is what the op needs: the output y where saves_output(op), else
/// the input x. dx may be dy.
void unary_backward(UnaryOp op, const TensorView& saved, const TensorView& dy, const TensorView& dx,
                    double slope = 0.01);
constexpr bool saves_output(UnaryOp op) {
  return op == UnaryOp::exp || op == UnaryOp::sqrt || op == UnaryOp::rsqrt || op == UnaryOp::tanh ||
         op == UnaryOp::sigmoid || op == UnaryOp::relu;
}

/// y = scale * x + shift. Floating dtypes of x and y may differ. y may be x.
void affine(const TensorView& x, double scale, double shift, const TensorView& y);
/// y = x ^ exponent. y may be x.
void pow_scalar(const TensorView& x, double exponent, const TensorView& y);
/// y = a * x + b * y element by element; x broadcasts to y's shape; floating dtypes may differ.
/// axpby(1, x, 1, y) is y += x.
void axpby(double a, const TensorView& x, double b, const TensorView& y);

/// y = x * mask / (1 - p), where element i (row-major) is kept iff uniform(philox(seed, offset, i /
/// 4)[i % 4]) >= p. The backward is the same call on dy: no mask is stored. y may be x.
void dropout(const TensorView& x, double p, std::uint64_t seed, std::uint64_t offset,
             const TensorView& y);

enum class ReduceOp : std::uint8_t { sum, mean, max };
/// y = op of x over the dimensions where y's size is 1 and x's is not; y has x's number of
/// dimensions. Fixed order. Dtypes of x and y may differ; integers and booleans are summed in f64.
/// accumulate (sum and mean only) adds to y. A max over nothing throws.
void reduce(ReduceOp op, const TensorView& x, const TensorView& y, bool accumulate = false);

}  // namespace cairn::kernels
