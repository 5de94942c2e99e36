#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>

namespace cairn::observe {

/// As many digits as tell the double apart; nan, inf, -inf.
inline std::string number(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

/// Six digits.
inline std::string short_number(double value) {
  std::array<char, 32> text;
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::general, 6);
  return {text.data(), end.ptr};
}

inline std::string fixed(double value, int digits) {
  std::array<char, 64> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value,
                                 std::chars_format::fixed, digits);
  return {text.data(), end.ptr};
}

}  // namespace cairn::observe
