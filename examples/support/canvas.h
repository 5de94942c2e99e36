// A small RGB picture: rectangles, lines, grey images and text, written as PNG.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace support {

struct Color {
  std::uint8_t r = 0, g = 0, b = 0;
};
inline constexpr Color kBlack{20, 20, 20}, kGrey{150, 150, 150}, kLightGrey{225, 225, 225},
    kBlue{40, 100, 200}, kRed{210, 50, 40}, kGreen{30, 140, 70};

class Canvas {
 public:
  Canvas(int width, int height, Color background = {255, 255, 255});
  int width() const { return width_; }
  int height() const { return height_; }

  void rectangle(int x, int y, int width, int height, Color color);
  void line(double x0, double y0, double x1, double y1, Color color);
  /// Bytes [height, width], 0 white to 255 black, each drawn as a square of `zoom` pixels.
  void image(int x, int y, const std::uint8_t* pixels, int width, int height, int zoom);
  /// 3 x 5 pixel letters times `zoom`; (x, y) is the upper left corner. Returns the width drawn.
  int text(int x, int y, std::string_view text, int zoom, Color color);
  static int text_width(std::string_view text, int zoom) {
    return static_cast<int>(text.size()) * 4 * zoom;
  }

  void save(const std::string& path) const;  // PNG; throws core::IoError

 private:
  void pixel(int x, int y, Color color);
  int width_, height_;
  std::vector<std::uint8_t> rgb_;
};

/// Draws y over x as a line with axes, ticks and a title into the rectangle.
struct Curve {
  std::string title;
  std::vector<double> x, y;
};
void draw_curve(Canvas& canvas, int left, int top, int width, int height, const Curve& curve);

}  // namespace support
