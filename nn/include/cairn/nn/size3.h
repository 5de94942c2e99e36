// A depth, a height and a width; one number means all three: Conv3d(1, 16, 3).
#pragma once

#include <array>
#include <cstdint>

namespace cairn::nn {

struct Size3 {
  std::int64_t depth, height, width;
  Size3(std::int64_t all)
      : depth(all), height(all), width(all) {}               // NOLINT: a number is meant to pass
  Size3(int all) : Size3(static_cast<std::int64_t>(all)) {}  // NOLINT
  Size3(std::int64_t depth, std::int64_t height, std::int64_t width)
      : depth(depth), height(height), width(width) {}
  std::array<std::int64_t, 3> array() const { return {depth, height, width}; }
  bool operator==(const Size3&) const = default;
};

}  // namespace cairn::nn
