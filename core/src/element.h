// One element converted from any C++ element type to another: half types pass through float.
#pragma once

#include <type_traits>

#include "cairn/core/half.h"

namespace cairn::core {

template <class T>
inline constexpr bool is_half_type = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

template <class To, class From>
To convert(From x) {
  if constexpr (is_half_type<From>) {
    return convert<To>(static_cast<float>(x));
  } else if constexpr (is_half_type<To>) {
    return To(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace cairn::core
