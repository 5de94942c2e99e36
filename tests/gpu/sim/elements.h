// Numbers as the vendors' libraries store them, read into and rounded once from double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cairn::gpusim {

enum class Element { f16, bf16, f32, f64 };

inline std::size_t size_of(Element element) {
  if (element == Element::f64) return 8;
  return element == Element::f32 ? 4 : 2;
}

/// f32 as tensor operations that take TF32 see it: 10 bits of fraction.
inline double to_tf32(double x) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1.0, std::ilogb(x) - 10);
  return std::nearbyint(x / unit) * unit;
}

namespace detail {

template <class T>
T get(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class T>
void put(void* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

inline double from_f16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

/// The nearest (ties to even) number with so many bits of exponent and fraction.
inline std::uint16_t round_to_half(double x, int exponent_bits, int fraction_bits) {
  const int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | infinity | 1 << (fraction_bits - 1));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  if (x == 0.0) return static_cast<std::uint16_t>(sign);
  const int least = 2 - (1 << (exponent_bits - 1));  // the exponent of the smallest normal number
  const int exponent = std::max(std::ilogb(x), least);
  if (exponent >= 1 << (exponent_bits - 1)) return static_cast<std::uint16_t>(sign | infinity);
  // In units of the last place; it holds the hidden bit, which carries into the exponent's field.
  const double units = std::nearbyint(std::ldexp(std::abs(x), fraction_bits - exponent));
  const int bits = ((exponent - least) << fraction_bits) + static_cast<int>(units);
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

}  // namespace detail

inline double load(Element element, const void* from) {
  switch (element) {
    case Element::f16:
      return detail::from_f16(detail::get<std::uint16_t>(from));
    case Element::bf16: {
      const std::uint32_t bits = std::uint32_t{detail::get<std::uint16_t>(from)} << 16;
      return detail::get<float>(&bits);
    }
    case Element::f32:
      return detail::get<float>(from);
    case Element::f64:
      break;
  }
  return detail::get<double>(from);
}

inline void store(Element element, void* to, double value) {
  switch (element) {
    case Element::f16:
      return detail::put(to, detail::round_to_half(value, 5, 10));
    case Element::bf16:
      return detail::put(to, detail::round_to_half(value, 8, 7));
    case Element::f32:
      return detail::put(to, static_cast<float>(value));
    case Element::f64:
      return detail::put(to, value);
  }
}

}  // namespace cairn::gpusim
