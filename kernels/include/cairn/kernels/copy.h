// Filling and copying views. The rules of elementwise.h hold.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

void fill(const TensorView& y, double value);

/// y = x, converting the dtype; any two layouts of the same shape; across devices too. x broadcasts
/// to y's shape.
void copy(const TensorView& x, const TensorView& y);

}  // namespace cairn::kernels
