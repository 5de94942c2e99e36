// A picture of lines, bars, points, text and grey images, written as SVG: browsers show it.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace support {

inline constexpr const char *kBlack = "#1d2026", *kGrey = "#8b929c", *kLightGrey = "#e3e6ea",
                            *kBlue = "#2a66c8", *kRed = "#c9362b", *kGreen = "#1f8a4c";

enum class Anchor : std::uint8_t { start, middle, end };

class Svg {
 public:
  Svg(double width, double height);

  void rectangle(double x, double y, double width, double height, const char* color);
  void line(double x0, double y0, double x1, double y1, const char* color);
  void circle(double x, double y, double radius, const char* color);
  /// y is that of the line that letters stand on.
  void text(double x, double y, std::string_view text, const char* color = kBlack,
            Anchor anchor = Anchor::start);
  /// Bytes [side, side], 0 white to 255 black, each a square of `zoom`.
  void image(double x, double y, const std::uint8_t* pixels, int side, double zoom);

  void save(const std::string& path) const;  // throws core::IoError

 private:
  std::ostringstream body_;
};

/// 0 and up to `most`, at least that, in steps of 1, 2 or 5 times a power of `base`: 10, or 2 for
/// bytes.
std::vector<double> round_ticks(double most, int base = 10);

}  // namespace support
