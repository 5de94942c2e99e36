// A true weight kept as a bf16 weight and a 16-bit remainder, and one kept as an f32 master; what
// they mean stands in optimizer_update.h. One element at a time; cpu/update_loop.h does vectors.
#pragma once

#include <bit>
#include <cstdint>

#include "cairn/core/half.h"

namespace cairn::kernels::math {

CAIRN_HOST_DEVICE inline float join_master(core::BFloat16 weight, std::int16_t remainder) {
  const std::uint32_t high = static_cast<std::uint32_t>(weight.bits) << 16;
  return std::bit_cast<float>(high +
                              static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder)));
}

CAIRN_HOST_DEVICE inline void split_master(float truth, core::BFloat16& weight,
                                           std::int16_t& remainder) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(truth);
  if (truth != truth) bits = (bits & 0xffff0000u) | 0x00400000u;  // stays NaN
  weight.bits = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
  remainder = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
}

/// A master beside a half weight, of which `rounded` is its rounding: itself, or what somebody
/// wrote into the weight.
template <class T>
CAIRN_HOST_DEVICE inline float reconciled(T weight, T rounded, float master) {
  return weight.bits == rounded.bits ? master : static_cast<float>(weight);
}

/// The remainder of a weight that was `former` when the two agreed.
CAIRN_HOST_DEVICE inline std::int16_t reconciled_remainder(core::BFloat16 weight,
                                                           core::BFloat16 former,
                                                           std::int16_t remainder) {
  return weight.bits == former.bits ? remainder : std::int16_t{0};
}

}  // namespace cairn::kernels::math
