// GradientScale::scaler of gradients that ranks share.
#pragma once

#include <cstdint>

namespace cairn::core {

/// Of a zero that stands for what only other ranks have: whoever scales losses on this rank.
inline constexpr std::uint64_t kSomeScaler = ~std::uint64_t{0};

constexpr bool is_same_scaler(std::uint64_t a, std::uint64_t b) {
  const bool some = a == kSomeScaler || b == kSomeScaler;
  return a == b || (some && a != 0 && b != 0);
}

}  // namespace cairn::core
