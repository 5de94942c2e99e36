// How the operands of a batched product lie in memory.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// a [..., M, K], b [..., K, N], y [..., M, N] with equal leading dimensions; stride 0 repeats.
struct MatmulOperands {
  TensorView a, b, y;

  /// The same product told as y^T = b^T a^T.
  MatmulOperands transposed() const {
    return {b.transpose(-2, -1), a.transpose(-2, -1), y.transpose(-2, -1)};
  }
};

/// One of the last two strides is 1 and the other steps over whole rows (or columns): what oneDNN
/// takes without a copy.
bool is_plain_matrix(const TensorView& view);

/// The same product with as few leading dimensions as memory allows: those of size 1 are dropped,
/// neighbours merge, and one that b repeats over becomes rows of a and y.
MatmulOperands merge_batches(const MatmulOperands& operands);

/// The same product as oneDNN describes it: repeated leading dimensions have size 1, sizes of 1
/// have unambiguous strides.
MatmulOperands for_onednn(const MatmulOperands& operands);

}  // namespace cairn::kernels
