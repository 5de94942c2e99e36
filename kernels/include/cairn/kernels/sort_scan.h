// What goes along the elements of a row: the largest of them, and running sums. Rows are the last
// dimension, in any storage. The rules of elementwise.h hold.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// index [N, K] i64: where in each row of x [N, V], of any dtype, the K largest elements are (or
/// the smallest), in order, of equals the first one first. NaN counts as larger than all. K <= V.
void topk(const TensorView& x, const TensorView& index, bool largest = true);

/// y[..., i] = the sum of x[..., 0 .. i]; reverse: of x[..., i .. L - 1]. x and y [..., L] of one
/// floating dtype.
void cumsum(const TensorView& x, const TensorView& y, bool reverse = false);

}  // namespace cairn::kernels
