// Tensors beside another one, in its layout: masters and moments beside a weight.
#pragma once

#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/copy.h"

namespace cairn::kernels {

/// The same elements in the same order in memory, for views of one shape.
inline bool same_layout(const TensorView& a, const TensorView& b) {
  for (int i = 0; i < a.dims(); ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

/// Shaped and laid out like x, on its device; uninitialised.
inline Tensor empty_with_layout_of(
    const Tensor& x, DType dtype,
    core::MemoryCategory category = core::MemoryCategory::optimizer_state) {
  const core::MemoryCategoryGuard guard(category);
  return Tensor::empty_strided(x.shape(), x.strides(), dtype, x.device());
}

/// The same, with these values (of x's shape, any device), converted.
inline Tensor copy_beside(const Tensor& x, const TensorView& values, DType dtype,
                          core::MemoryCategory category = core::MemoryCategory::optimizer_state) {
  Tensor result = empty_with_layout_of(x, dtype, category);
  copy(values, result);
  return result;
}

/// `values` itself where it is laid out like x, else a copy, kept alive by `temporaries`. Has x's
/// strides.
inline TensorView laid_out_like(const Tensor& x, const Tensor& values,
                                std::vector<Tensor>& temporaries) {
  if (same_layout(values, x)) {
    return {values.raw_data(), x.shape(), x.strides(), values.dtype(), values.device()};
  }
  temporaries.push_back(copy_beside(x, values, values.dtype(), core::MemoryCategory::workspace));
  return temporaries.back();
}

}  // namespace cairn::kernels
