// The fastest of the algorithms that cuBLASLt proposes for a product, found by timing all of them.
#pragma once

#include "cairn/core/tensor.h"
#include "works.h"

namespace bench {

/// y[M, N] = a[M, K] b[K, N] on the default device, a GPU; a and b may be transposed and must
/// outlive the runs. Sums in f32.
Run best_product(const cairn::TensorView& a, const cairn::TensorView& b, const cairn::Tensor& y);

}  // namespace bench
