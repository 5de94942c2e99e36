// Softmax over the last dimension.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

struct SoftmaxOptions {
  bool log = false;  // log-softmax
  /// x [..., T, S]: row t sees columns 0 .. t + S - T only; the others give 0 (log: -inf).
  bool causal = false;
  double scale = 1.0;  // applied to x first
  /// [x.size(0)] i64, or undefined: rows of x[b] see columns 0 .. lengths[b] - 1 only (x of two
  /// dimensions at least). A row that sees none gives 0 (log: -inf).
  TensorView lengths = {};
};
/// y = softmax(scale * x); y may be x.
void softmax(const TensorView& x, const TensorView& y, const SoftmaxOptions& options = {});
/// dx from the forward's output y; dx may be dy.
void softmax_backward(const TensorView& y, const TensorView& dy, const TensorView& dx,
                      const SoftmaxOptions& options = {});

}  // namespace cairn::kernels
