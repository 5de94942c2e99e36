// Sizes that change from step to step are of a few classes, for each of which something is found
// out, or made, once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace cairn::kernels::cuda {

/// The largest size of `size`'s class: sizes of a class are within an eighth of each other, eight
/// classes to a doubling, but for small ones, whose classes are multiples of `least`.
inline std::int64_t class_of(std::int64_t size, std::int64_t least = 1) {
  const auto n = static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1));
  const std::uint64_t step =
      std::max<std::uint64_t>(std::bit_floor(n - 1) / 8, static_cast<std::uint64_t>(least));
  return static_cast<std::int64_t>((n + step - 1) / step * step);
}

}  // namespace cairn::kernels::cuda
