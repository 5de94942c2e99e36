// f16 and bf16, by the definition of their formats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace cairn::ptx {

struct HalfFormat {
  int fraction, least_exponent;  // bits of the fraction; of normal numbers
};
inline constexpr HalfFormat kF16{10, -14}, kBf16{7, -126};

inline float widened(std::uint16_t bits, HalfFormat format) {
  const int exponent = (bits & 0x7fff) >> format.fraction, one = 1 << format.fraction;
  const int fraction = bits & (one - 1), unit = format.least_exponent - format.fraction;
  double magnitude =
      exponent == 0 ? std::ldexp(fraction, unit) : std::ldexp(one + fraction, exponent - 1 + unit);
  if (exponent == 0x7fff >> format.fraction) {
    magnitude = fraction == 0 ? INFINITY : std::numeric_limits<double>::quiet_NaN();
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

/// Rounds to the nearest, of two to the even one.
inline std::uint16_t narrowed(float x, HalfFormat format) {
  if (std::isnan(x)) return 0x7fff;
  const int sign = std::signbit(x) ? 0x8000 : 0;
  const int infinity = 0x7fff >> format.fraction << format.fraction;
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  const int exponent =
      x == 0 ? format.least_exponent : std::max(std::ilogb(x), format.least_exponent);
  const double units = std::nearbyint(std::ldexp(std::abs(double{x}), format.fraction - exponent));
  const int bits =
      ((exponent - format.least_exponent) << format.fraction) + static_cast<int>(units);
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

}  // namespace cairn::ptx
