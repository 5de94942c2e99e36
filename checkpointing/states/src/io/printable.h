// Text from a file, in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace cairn::checkpointing {

/// A control character at this place, of ASCII or (two bytes of UTF-8) of C1: a terminal may obey
/// it.
inline bool is_control(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(at) < 0x20 || byte(at) == 0x7f) return true;
  const bool after_c2 = at > 0 && byte(at - 1) == 0xc2, before_c1 = at + 1 < text.size();
  if (after_c2) return byte(at) >= 0x80 && byte(at) < 0xa0;
  return byte(at) == 0xc2 && before_c1 && byte(at + 1) >= 0x80 && byte(at + 1) < 0xa0;
}

/// With control characters as \x1b.
inline std::string escaped(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (is_control(text, i)) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += text[i];
    }
  }
  return out;
}

/// The first hundred bytes of that.
inline std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 100;
  const std::string out = escaped(text.substr(0, kMost));
  return text.size() > kMost ? out + "..." : out;
}

}  // namespace cairn::checkpointing
