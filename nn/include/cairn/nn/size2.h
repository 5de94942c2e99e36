// A height and a width; one number means both: Conv2d(1, 16, 5), MaxPool2d({.kernel = {2, 3}}).
#pragma once

#include <array>
#include <cstdint>

namespace cairn::nn {

struct Size2 {
  std::int64_t height, width;
  Size2(std::int64_t both) : height(both), width(both) {}      // NOLINT: a number is meant to pass
  Size2(int both) : Size2(static_cast<std::int64_t>(both)) {}  // NOLINT
  Size2(std::int64_t height, std::int64_t width) : height(height), width(width) {}
  std::array<std::int64_t, 2> array() const { return {height, width}; }
  bool operator==(const Size2&) const = default;
};

}  // namespace cairn::nn
