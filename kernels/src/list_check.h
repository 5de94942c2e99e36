// What the passes over lists of tensors ask of each tensor.
#pragma once

#include "check.h"

namespace cairn::kernels {

inline void check_list_dtype(const char* op, const char* what, std::size_t i, const TensorView& v) {
  CAIRN_CHECK(core::is_half(v.dtype) || v.dtype == DType::f32, op, "expected ", what, " ", i,
              " of dtype f16, bf16 or f32, got ", core::name(v.dtype));
}

inline void check_dense(const char* op, const char* what, std::size_t i, const TensorView& v) {
  CAIRN_CHECK(v.is_dense(), op, "expected a dense ", what, " ", i,
              " (no gaps, no repeats), got shape ", v.shape, " with strides ", v.strides);
}

}  // namespace cairn::kernels
