#include "support/svg.h"

#include <png.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "cairn/core/error.h"

namespace support {
namespace {

using cairn::core::fail;
using cairn::core::IoError;

std::string base64(const std::vector<std::uint8_t>& bytes) {
  constexpr std::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const std::size_t there = std::min<std::size_t>(3, bytes.size() - at);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < 3; ++i) word = word << 8 | (i < there ? bytes[at + i] : 0U);
    for (std::size_t i = 0; i < 4; ++i)
      text += i <= there ? kLetters[word >> (18 - 6 * i) & 63U] : '=';
  }
  return text;
}

std::vector<std::uint8_t> png_of(const std::vector<std::uint8_t>& grey, int side) {
  png_image image;
  std::memset(&image, 0, sizeof image);
  image.version = PNG_IMAGE_VERSION;
  image.width = image.height = static_cast<png_uint_32>(side);
  image.format = PNG_FORMAT_GRAY;
  std::vector<std::uint8_t> file(PNG_IMAGE_PNG_SIZE_MAX(image));
  png_alloc_size_t bytes = file.size();
  if (png_image_write_to_memory(&image, file.data(), &bytes, 0, grey.data(), 0, nullptr) == 0)
    fail<IoError>("png", image.message);
  file.resize(bytes);
  return file;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char letter : text) {
    if (letter == '&' || letter == '<') {
      out += letter == '&' ? "&amp;" : "&lt;";
    } else {
      out += letter;
    }
  }
  return out;
}

}  // namespace

Svg::Svg(double width, double height) {
  body_ << R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 )" << width << ' ' << height
        << R"(" width=")" << width << R"(" height=")" << height
        << R"(" font-family="system-ui, sans-serif" font-size="13">)"
        << "\n";
  rectangle(0, 0, width, height, "white");
}

void Svg::rectangle(double x, double y, double width, double height, const char* color) {
  body_ << R"(<rect x=")" << x << R"(" y=")" << y << R"(" width=")" << width << R"(" height=")"
        << height << R"(" fill=")" << color << "\"/>\n";
}

void Svg::line(double x0, double y0, double x1, double y1, const char* color) {
  body_ << R"(<line x1=")" << x0 << R"(" y1=")" << y0 << R"(" x2=")" << x1 << R"(" y2=")" << y1
        << R"(" stroke=")" << color << "\"/>\n";
}

void Svg::circle(double x, double y, double radius, const char* color) {
  body_ << R"(<circle cx=")" << x << R"(" cy=")" << y << R"(" r=")" << radius << R"(" fill=")"
        << color << "\"/>\n";
}

void Svg::text(double x, double y, std::string_view text, const char* color, Anchor anchor) {
  constexpr const char* kAnchors[] = {"start", "middle", "end"};
  body_ << R"(<text x=")" << x << R"(" y=")" << y << R"(" fill=")" << color << R"(" text-anchor=")"
        << kAnchors[static_cast<int>(anchor)] << "\">" << escaped(text) << "</text>\n";
}

void Svg::image(double x, double y, const std::uint8_t* pixels, int side, double zoom) {
  std::vector<std::uint8_t> grey(static_cast<std::size_t>(side) * static_cast<std::size_t>(side));
  for (std::size_t i = 0; i < grey.size(); ++i)
    grey[i] = static_cast<std::uint8_t>(255 - pixels[i]);
  body_ << R"(<image x=")" << x << R"(" y=")" << y << R"(" width=")" << side * zoom
        << R"(" height=")" << side * zoom << R"(" style="image-rendering:pixelated")"
        << R"( href="data:image/png;base64,)" << base64(png_of(grey, side)) << "\"/>\n";
}

void Svg::save(const std::string& path) const {
  std::ofstream file(path, std::ios::binary);
  file << body_.str() << "</svg>\n";
  if (!file.flush()) fail<IoError>("svg", "cannot write ", path);
}

std::vector<double> round_ticks(double most, int base) {
  constexpr int kAbout = 5;
  double step = std::pow(base, std::floor(std::log(most / kAbout) / std::log(base)));
  for (const double more : base == 10 ? std::vector<double>{2, 2.5, 2} : std::vector<double>{2}) {
    if (most / step <= kAbout) break;
    step *= more;
  }
  std::vector<double> ticks{0};
  while (ticks.back() < most) ticks.push_back(step * static_cast<double>(ticks.size()));
  return ticks;
}

}  // namespace support
