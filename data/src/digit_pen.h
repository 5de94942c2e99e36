// Draws one digit: picks a style, varies it, and lays the ink on 28 x 28 pixels.
#pragma once

#include <cstdint>

namespace cairn::data::detail {

inline constexpr int kDigitSide = 28;

/// Draws `digit` (0-9) into pixels [28, 28] u8, row-major, 0 = paper, 255 = ink. The same bits for
/// the same (seed, image) everywhere.
void draw_digit(std::uint64_t seed, std::uint64_t image, int digit, std::uint8_t* pixels);

/// The digit that image number `image` shows.
int digit_of(std::uint64_t seed, std::uint64_t image);

}  // namespace cairn::data::detail
