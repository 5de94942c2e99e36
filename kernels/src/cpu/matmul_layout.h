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

/// One leading dimension at most, and the matrices packed one after another: what oneDNN's batched
/// product is fast for.
bool is_packed(const MatmulOperands& operands);

/// The number of matrices, and the offset in elements of the first element of one of them.
std::int64_t matrix_count(const TensorView& view);
std::int64_t matrix_offset(const TensorView& view, std::int64_t index);
/// One of the products.
MatmulOperands matrix_at(const MatmulOperands& operands, std::int64_t index);

}  // namespace cairn::kernels
