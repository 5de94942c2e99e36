// Single elements of a view, as double: for edges and rare dtypes, not for loops that matter.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels::cpu {

/// The element at an offset (in elements) from the view's first.
inline double element_at(const TensorView& view, std::int64_t offset) {
  double value = 0.0;
  core::dispatch_all(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T x = view.as<T>()[offset];
    if constexpr (std::is_same_v<T, core::Half> || std::is_same_v<T, core::BFloat16>) {
      value = static_cast<double>(static_cast<float>(x));
    } else {
      value = static_cast<double>(x);
    }
  });
  return value;
}

inline void set_element(const TensorView& view, std::int64_t offset, double value) {
  core::dispatch_all(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, core::Half> || std::is_same_v<T, core::BFloat16>) {
      view.as<T>()[offset] = T(static_cast<float>(value));
    } else {
      view.as<T>()[offset] = static_cast<T>(value);
    }
  });
}

}  // namespace cairn::kernels::cpu
