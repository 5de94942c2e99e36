#include "support/canvas.h"

#include <png.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "cairn/core/error.h"

namespace support {
namespace {

// Rows from the top, three bits each: 0 - 9, a - z, then punctuation.
constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyz.-+%:/=";
constexpr std::array<std::uint16_t, 43> kGlyphs = {
    075557, 026227, 071747, 071717, 055711, 074717, 074757, 071111, 075757, 075717,  // 0 - 9
    025755, 065656, 034443, 065556, 074647, 074644, 034553, 055755, 072227, 011152,  // a - j
    055655, 044447, 057755, 065555, 025552, 065644, 025573, 065655, 034216, 072222,  // k - t
    055557, 055552, 055775, 055255, 055222, 071247,                                  // u - z
    000002, 000700, 002720, 051245, 002020, 011244, 007070};

std::uint16_t glyph(char letter) {
  const std::size_t at =
      kLetters.find(static_cast<char>(std::tolower(static_cast<unsigned char>(letter))));
  return at == std::string_view::npos ? 0 : kGlyphs[at];
}

std::string short_number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), std::abs(value) < 1000 ? "%.3g" : "%.0f", value);
  return text.data();
}

}  // namespace

Canvas::Canvas(int width, int height, Color background)
    : width_(width), height_(height), rgb_(static_cast<std::size_t>(width) * height * 3) {
  rectangle(0, 0, width, height, background);
}

void Canvas::pixel(int x, int y, Color color) {
  if (x < 0 || y < 0 || x >= width_ || y >= height_) return;
  std::uint8_t* at = rgb_.data() + (static_cast<std::size_t>(y) * width_ + x) * 3;
  at[0] = color.r, at[1] = color.g, at[2] = color.b;
}

void Canvas::rectangle(int x, int y, int width, int height, Color color) {
  for (int row = y; row < y + height; ++row) {
    for (int column = x; column < x + width; ++column) pixel(column, row, color);
  }
}

void Canvas::line(double x0, double y0, double x1, double y1, Color color) {
  const int steps =
      std::max(1, static_cast<int>(std::ceil(std::max(std::abs(x1 - x0), std::abs(y1 - y0)))));
  for (int i = 0; i <= steps; ++i) {
    const double t = static_cast<double>(i) / steps;
    const int x = static_cast<int>(std::lround(x0 + t * (x1 - x0)));
    const int y = static_cast<int>(std::lround(y0 + t * (y1 - y0)));
    pixel(x, y, color);
    pixel(x, y + 1, color);
  }
}

void Canvas::image(int x, int y, const std::uint8_t* pixels, int width, int height, int zoom) {
  for (int row = 0; row < height; ++row) {
    for (int column = 0; column < width; ++column) {
      const auto shade = static_cast<std::uint8_t>(255 - pixels[row * width + column]);
      rectangle(x + column * zoom, y + row * zoom, zoom, zoom, {shade, shade, shade});
    }
  }
}

int Canvas::text(int x, int y, std::string_view text, int zoom, Color color) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::uint16_t bits = glyph(text[i]);
    for (int cell = 0; cell < 15; ++cell) {
      if (((bits >> (14 - cell)) & 1) == 0) continue;
      rectangle(x + (static_cast<int>(i) * 4 + cell % 3) * zoom, y + cell / 3 * zoom, zoom, zoom,
                color);
    }
  }
  return text_width(text, zoom);
}

void Canvas::save(const std::string& path) const {
  png_image image;
  std::memset(&image, 0, sizeof image);
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width_);
  image.height = static_cast<png_uint_32>(height_);
  image.format = PNG_FORMAT_RGB;
  if (png_image_write_to_file(&image, path.c_str(), 0, rgb_.data(), 0, nullptr) == 0) {
    cairn::core::fail<cairn::core::IoError>("png", "cannot write ", path, ": ", image.message);
  }
}

void draw_curve(Canvas& canvas, int left, int top, int width, int height, const Curve& curve) {
  constexpr int kZoom = 2, kMarginLeft = 64, kMarginBottom = 24, kMarginTop = 20, kTicks = 4;
  const int x0 = left + kMarginLeft, y0 = top + kMarginTop, w = width - kMarginLeft - 12,
            h = height - kMarginTop - kMarginBottom;
  canvas.text(x0, top, curve.title, kZoom, kBlack);
  if (curve.x.empty()) return;

  const double x_low = curve.x.front(), x_high = std::max(curve.x.back(), x_low + 1);
  const auto [low, high] = std::minmax_element(curve.y.begin(), curve.y.end());
  const double y_low = std::min(0.0, *low), y_high = std::max(*high, y_low + 1e-9);
  const auto to_x = [&](double x) { return x0 + (x - x_low) / (x_high - x_low) * w; };
  const auto to_y = [&](double y) { return y0 + h - (y - y_low) / (y_high - y_low) * h; };

  for (int tick = 0; tick <= kTicks; ++tick) {
    const double y = y_low + (y_high - y_low) * tick / kTicks,
                 x = x_low + (x_high - x_low) * tick / kTicks;
    canvas.rectangle(x0, static_cast<int>(to_y(y)), w, 1, kLightGrey);
    const std::string y_label = short_number(y), x_label = short_number(x);
    canvas.text(x0 - 6 - Canvas::text_width(y_label, kZoom), static_cast<int>(to_y(y)) - 5, y_label,
                kZoom, kBlack);
    canvas.text(static_cast<int>(to_x(x)) - Canvas::text_width(x_label, kZoom) / 2, y0 + h + 8,
                x_label, kZoom, kBlack);
  }
  canvas.rectangle(x0, y0, 1, h, kGrey);
  canvas.rectangle(x0, y0 + h, w, 1, kGrey);
  for (std::size_t i = 1; i < curve.x.size(); ++i) {
    canvas.line(to_x(curve.x[i - 1]), to_y(curve.y[i - 1]), to_x(curve.x[i]), to_y(curve.y[i]),
                kBlue);
  }
}

}  // namespace support
