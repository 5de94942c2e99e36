// What the passes over lists of tensors ask of each tensor.
#pragma once

#include <vector>

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

/// As long as `like`, and each tensor of the shape and strides of that of its index; in place only
/// with its dtype.
inline void check_partner_list(const char* op, const char* what,
                               const std::vector<TensorView>& list, const char* like_what,
                               const std::vector<TensorView>& like) {
  CAIRN_CHECK(list.size() == like.size(), op, "expected as many tensors in ", what, " as in ",
              like_what, ", ", like.size(), ", got ", list.size());
  check_float_list(op, what, list);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const TensorView &v = list[i], &w = like[i];
    CAIRN_CHECK(v.device == w.device, op, "expected ", what, " ", i, " on ", w.device,
                ", the device of ", like_what, " ", i, ", got ", v.device);
    CAIRN_CHECK(v.shape == w.shape, op, "expected ", what, " ", i, " of shape ", w.shape, " like ",
                like_what, " ", i, ", got ", v.shape);
    for (int d = 0; d < v.dims(); ++d) {
      CAIRN_CHECK(
          v.shape[d] < 2 || v.numel() == 0 || v.strides[d] == w.strides[d], op, "expected ", what,
          " ", i, " with strides ", w.strides, " like ", like_what, " ", i, ", got ", v.strides,
          " (a list pass visits memory in order: kernels::copy one into the other's layout)");
    }
    CAIRN_CHECK(v.data != w.data || v.dtype == w.dtype || v.numel() == 0, op, "expected ", what,
                " ", i, ", which shares the memory of ", like_what, " ", i, ", of its dtype ",
                core::name(w.dtype), ", got ", core::name(v.dtype));
  }
}

}  // namespace cairn::kernels
