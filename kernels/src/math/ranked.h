// The order in which topk gives elements; for the CPU's loops and for CUDA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cairn/core/half.h"

namespace cairn::kernels {

/// An element and its place in the row; place < 0: none. Without padding, so that words can be
/// moved.
template <class T>
struct Ranked {
  using Value = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;
  Value value;
  std::int64_t place;
};

/// Whether a comes before b: the larger one (or the smaller), of equals the first. NaN is larger
/// than all.
template <class T>
CAIRN_HOST_DEVICE bool comes_before(const Ranked<T>& a, const Ranked<T>& b, bool largest) {
  if (a.place < 0 || b.place < 0) return b.place < 0;
  const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  if (a_is_nan != b_is_nan) return a_is_nan == largest;
  if (a_is_nan || a.value == b.value) return a.place < b.place;
  return (a.value > b.value) == largest;
}

}  // namespace cairn::kernels
