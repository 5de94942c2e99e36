// What the public functions ask of their views before a backend sees them. Each throws
// InvalidArgument "[op] expected ..., got ...".
#pragma once

#include <initializer_list>
#include <string_view>

#include "cairn/core/error.h"
#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// A view and the name its messages use.
struct Named {
  std::string_view name;
  const TensorView& view;
};

inline void check_defined(std::string_view op, std::initializer_list<Named> views) {
  for (const Named& v : views) {
    CAIRN_CHECK(v.view.defined(), op, "expected a defined ", v.name, ", got an undefined view");
  }
}

/// All defined and on the device of the first.
inline void check_device(std::string_view op, std::initializer_list<Named> views) {
  check_defined(op, views);
  const Named& first = *views.begin();
  for (const Named& v : views) {
    CAIRN_CHECK(v.view.device == first.view.device, op, "expected ", v.name, " on ",
                first.view.device, ", the device of ", first.name, ", got ", v.view.device);
  }
}

inline void check_shape(std::string_view op, const Named& v, const Shape& shape) {
  CAIRN_CHECK(v.view.shape == shape, op, "expected ", v.name, " of shape ", shape, ", got ",
              v.view.shape);
}

/// All of the first one's shape.
inline void check_same_shape(std::string_view op, std::initializer_list<Named> views) {
  const Named& first = *views.begin();
  for (const Named& v : views) {
    CAIRN_CHECK(v.view.shape == first.view.shape, op, "expected ", v.name, " of shape ",
                first.view.shape, " like ", first.name, ", got ", v.view.shape);
  }
}

inline void check_dtype(std::string_view op, const Named& v, DType dtype) {
  CAIRN_CHECK(v.view.dtype == dtype, op, "expected ", v.name, " of dtype ", core::name(dtype),
              ", got ", core::name(v.view.dtype));
}

/// All of the first one's dtype.
inline void check_same_dtype(std::string_view op, std::initializer_list<Named> views) {
  const Named& first = *views.begin();
  for (const Named& v : views) {
    CAIRN_CHECK(v.view.dtype == first.view.dtype, op, "expected ", v.name, " of dtype ",
                core::name(first.view.dtype), " like ", first.name, ", got ",
                core::name(v.view.dtype));
  }
}

inline void check_floating(std::string_view op, std::initializer_list<Named> views) {
  for (const Named& v : views) {
    CAIRN_CHECK(core::is_floating(v.view.dtype), op, "expected ", v.name,
                " of dtype f16, bf16, f32 or f64, got ", core::name(v.view.dtype));
  }
}

inline void check_dims(std::string_view op, const Named& v, int dims) {
  CAIRN_CHECK(v.view.dims() == dims, op, "expected ", v.name, " of ", dims,
              " dimensions, got shape ", v.view.shape);
}

/// How much of each of `count` sequences counts, contiguous on `like`'s device; nothing where
/// lengths are undefined.
inline void check_lengths(std::string_view op, const Named& like, const Named& lengths,
                          std::int64_t count) {
  if (!lengths.view.defined()) return;
  check_device(op, {like, lengths});
  check_shape(op, lengths, {count});
  check_dtype(op, lengths, DType::i64);
  CAIRN_CHECK(lengths.view.is_contiguous(), op, "expected contiguous ", lengths.name,
              ", got strides ", lengths.view.strides);
}

/// What the call is about to write, for those who must notice (Storage::version).
template <class... Views>
void wrote(const Views&... views) {
  (views.bump_version(), ...);
}

/// Broadcasts a view to a shape for reading; the message names both.
inline TensorView broadcast_to(std::string_view op, const Named& v, const Shape& shape) {
  const int extra = shape.dims() - v.view.dims();
  bool fits = extra >= 0;
  for (int i = 0; fits && i < v.view.dims(); ++i) {
    fits = v.view.shape[i] == shape[i + extra] || v.view.shape[i] == 1;
  }
  CAIRN_CHECK(fits, op, "expected ", v.name, " of a shape that broadcasts to ", shape, ", got ",
              v.view.shape);
  return v.view.expand(shape);
}

}  // namespace cairn::kernels
