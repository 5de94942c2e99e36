// Element-wise kernels on views. Copies, dropout and reductions come along: nearly everybody wants
// them beside these.
//
// Common rules of this folder (they hold for every header in it):
//  - Views may be strided and repeated (stride 0) on input; outputs must not overlap inputs unless
//    a function says so.
//  - All views of a call live on one device; work is queued on its current stream, in order.
//  - Arithmetic is in f32 (f64 for f64); half inputs are widened, results rounded once.
//  - Wrong shapes, dtypes or devices throw core::InvalidArgument "[op] expected ..., got ...";
//    empty views are fine.
//  - "accumulate" adds the result to what the output holds; otherwise the output is overwritten.
#pragma once

#include <cstdint>

#include "cairn/core/tensor_view.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/dropout.h"
#include "cairn/kernels/reduce.h"

namespace cairn::kernels {

enum class BinaryOp : std::uint8_t {
  add,
  sub,
  mul,
  div,
  pow,
  maximum,
  minimum,
  atan2,     // angle of the point (b, a): b to the right, a up
  add_relu,  // a + b where that is not below 0, else 0
  mask,      // a where b is not 0, else 0, whatever a is
  eq,
  ne,
  lt,
  le,
  gt,
  ge
};
/// Whether the op asks a question: eq and those after it.
constexpr bool is_comparison(BinaryOp op) {
  return op >= BinaryOp::eq;
}
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

/// What a product may apply to its result (matmul.h); UnaryOp has more.
enum class Activation : std::uint8_t { none, relu, gelu_tanh, gelu };
constexpr UnaryOp unary_of(Activation activation) {  // not of Activation::none
  switch (activation) {
    case Activation::gelu_tanh:
      return UnaryOp::gelu_tanh;
    case Activation::gelu:
      return UnaryOp::gelu;
    default:
      return UnaryOp::relu;
  }
}

/// y = scale * x + shift. Floating dtypes of x and y may differ. y may be x.
void affine(const TensorView& x, double scale, double shift, const TensorView& y);
/// y = x ^ exponent. y may be x.
void pow_scalar(const TensorView& x, double exponent, const TensorView& y);
/// y = a * x + b * y element by element; x broadcasts to y's shape; floating dtypes may differ.
/// axpby(1, x, 1, y) is y += x.
void axpby(double a, const TensorView& x, double b, const TensorView& y);

}  // namespace cairn::kernels
