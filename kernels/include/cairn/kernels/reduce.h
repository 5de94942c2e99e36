// Sums, means and maxima over dimensions. The rules of elementwise.h hold.
#pragma once

#include <cstdint>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

enum class ReductionKind : std::uint8_t { sum, mean, max };
/// y = op of x over the dimensions where y's size is 1 and x's is not; y has x's number of
/// dimensions. Fixed order. Dtypes of x and y may differ; integers and booleans are summed in f64.
/// accumulate (sum and mean only) adds to y. A max over nothing throws.
void reduce(ReductionKind op, const TensorView& x, const TensorView& y, bool accumulate = false);

}  // namespace cairn::kernels
