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

/// All defined, dense and on the device of the first.
inline void check_list(const char* op, const char* what, const std::vector<TensorView>& list) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    CAIRN_CHECK(list[i].defined(), op, "expected a defined ", what, " ", i,
                ", got an undefined view");
    CAIRN_CHECK(list[i].device == list[0].device, op, "expected every ", what, " on ",
                list[0].device, ", the device of the first, got ", what, " ", i, " on ",
                list[i].device);
    check_dense(op, what, i, list[i]);
  }
}

inline void check_float_list(const char* op, const char* what,
                             const std::vector<TensorView>& list) {
  check_list(op, what, list);
  for (std::size_t i = 0; i < list.size(); ++i) check_list_dtype(op, what, i, list[i]);
}

}  // namespace cairn::kernels
