// Memory for the length of one kernel call, accounted as workspace.
#pragma once

#include "cairn/core/memory.h"
#include "cairn/core/tensor.h"

namespace cairn::kernels {

/// What sums are kept in.
inline DType wide(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

/// A view and, where it is not the caller's, the tensor that holds its memory.
struct Temporary {
  Tensor owner;
  TensorView view;
};

inline Temporary temporary(const Shape& shape, const Strides& strides, DType dtype, Device device) {
  const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
  Tensor owner = Tensor::empty_strided(shape, strides, dtype, device);
  const TensorView view = owner.view();
  return {std::move(owner), view};
}

inline Temporary temporary(const Shape& shape, DType dtype, Device device) {
  return temporary(shape, core::contiguous_strides(shape), dtype, device);
}

}  // namespace cairn::kernels
