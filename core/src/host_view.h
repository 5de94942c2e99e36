// Walking over the elements of strided views, and bringing device memory to the host to do so.
#pragma once

#include "cairn/core/tensor.h"

namespace cairn::core {

/// Elements from the first to one past the last that the view touches; 0 for an empty view.
inline std::int64_t span_of(const TensorView& view) {
  if (view.numel() == 0) return 0;
  std::int64_t span = 1;
  for (int i = 0; i < view.dims(); ++i) span += (view.shape[i] - 1) * view.strides[i];
  return span;
}

/// Equal strides in every dimension of more than one element.
inline bool same_layout(const TensorView& a, const TensorView& b) {
  for (int i = 0; i < a.dims(); ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

/// The view itself on a CPU device, a copy of its span of a CUDA device; ready to read (it waits
/// for the current stream).
class HostView {
 public:
  explicit HostView(const TensorView& source);
  const TensorView& view() const { return view_; }

 private:
  Tensor copy_;
  TensorView view_;
};

/// f(x) for every element in row-major order.
template <class T, class F>
void for_each_element(const TensorView& view, F&& f) {
  const std::int64_t n = view.numel();
  const T* at = view.as<T>();
  if (view.is_contiguous()) {
    for (std::int64_t i = 0; i < n; ++i) f(at[i]);
    return;
  }
  Shape index = Shape::filled(view.dims(), 0);
  for (std::int64_t i = 0; i < n; ++i) {
    f(*at);
    for (int d = view.dims() - 1; d >= 0; --d) {
      at += view.strides[d];
      if (++index[d] < view.shape[d]) break;
      at -= view.strides[d] * view.shape[d];
      index[d] = 0;
    }
  }
}

}  // namespace cairn::core
