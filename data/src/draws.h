// What a sample draws while it is read: of the calling thread's generator.
#pragma once

#include <cstdint>

#include "cairn/core/generator.h"

namespace cairn::data::detail {

inline std::uint32_t draw_bits() {
  const core::RandomDraw draw = Generator::current().draw();
  return core::philox(draw.seed, draw.offset, 0)[0];
}

/// [0, 1).
inline double draw_uniform() {
  return core::uniform_from_bits(draw_bits());
}

/// A whole number of [0, choices), all alike.
inline std::int64_t draw_below(std::int64_t choices) {
  return static_cast<std::int64_t>((draw_bits() * static_cast<std::uint64_t>(choices)) >> 32);
}

}  // namespace cairn::data::detail
