// Signatures and sizes of zip records (APPNOTE 6.3), and little-endian fields.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace cairn::checkpointing::zip {

static_assert(std::endian::native == std::endian::little, "zip fields are little-endian");

inline constexpr std::uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50,
                               kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
inline constexpr std::uint64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22,
                               kEnd64Bytes = 56, kLocator64Bytes = 20;
inline constexpr std::uint32_t kIn64 = 0xffffffff;  // the value stands in a zip64 record
inline constexpr std::uint16_t kCountIn64 = 0xffff;
inline constexpr std::uint16_t kExtra64 = 1;

template <class T>
T field(std::string_view bytes, std::uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace cairn::checkpointing::zip
