// Table lookup.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// y[n, :] = weight[index[n], :]. weight [V, D], index [N] i64, y [N, D] of weight's dtype. An
/// index outside 0..V-1 throws (CPU; on CUDA the row is NaN).
void embedding(const TensorView& weight, const TensorView& index, const TensorView& y);
/// dweight[index[n], :] += dy[n, :], rows of one index added in order of n. Without accumulate
/// dweight is zeroed first. dweight may be f32 with half dy.
void embedding_backward(const TensorView& dy, const TensorView& index, const TensorView& dweight,
                        bool accumulate);

}  // namespace cairn::kernels
