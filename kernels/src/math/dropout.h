// Which elements dropout keeps. Element i draws word i % 4 of philox(seed, offset, i / 4) and is
// kept iff its uniform value is >= p.
#pragma once

#include <cmath>
#include <cstdint>

#include "cairn/core/generator.h"

namespace cairn::kernels::math {

/// uniform_from_bits(bits) >= p, as integers: bits >> 8 >= threshold, exactly.
inline std::uint32_t dropout_threshold(double p) {
  return static_cast<std::uint32_t>(std::ceil(p * 0x1p24));
}
CAIRN_HOST_DEVICE constexpr bool dropout_keeps(std::uint32_t bits, std::uint32_t threshold) {
  return (bits >> 8) >= threshold;
}

}  // namespace cairn::kernels::math
