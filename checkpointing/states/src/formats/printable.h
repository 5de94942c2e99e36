// Text from a file, in messages.
#pragma once

#include <string>
#include <string_view>

namespace cairn::checkpointing {

/// The first hundred bytes, with control characters escaped.
inline std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 100;
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return text.size() > kMost ? out + "..." : out;
}

}  // namespace cairn::checkpointing
