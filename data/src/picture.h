// Pictures: how they come from JPEG and PNG files, and parts of them at another size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::data::detail {

struct Picture {
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
};

/// A file whose header is read.
class EncodedPicture {
 public:
  /// Throws IoError where the file cannot be read, DataError where it is neither a JPEG nor a PNG,
  /// or of more than 2^27 pixels.
  explicit EncodedPicture(const std::string& path);

  std::int64_t height() const { return height_; }
  std::int64_t width() const { return width_; }
  /// A JPEG's at 1/reduction (1, 2, 4 or 8) of its size, rounded up, at a fraction of the time; a
  /// PNG has no such form. Throws DataError where it is damaged.
  Picture decode(int reduction = 1) const;
  bool reduces() const { return jpeg_; }

 private:
  void read_jpeg_header();
  void read_png_header();
  Picture decode_jpeg(int reduction) const;
  Picture decode_png() const;
  [[noreturn]] void fail_with(const std::string& what) const;

  std::string path_, bytes_;
  bool jpeg_ = false, cmyk_ = false;
  std::int64_t height_ = 0, width_ = 0;
};

/// Rows [top, top + height) of a picture, and such columns.
struct Window {
  std::int64_t top = 0, left = 0, height = 0, width = 0;
};

/// The window `from`, resized to height x width, of which `part` is written as planes
/// [3, part.height, part.width]. Bilinear, with Pillow's bits (columns first): where it shrinks,
/// the filter is as wide as what becomes one pixel.
void resize(const Picture& picture, const Window& from, std::int64_t height, std::int64_t width,
            const Window& part, std::uint8_t* planes);

}  // namespace cairn::data::detail
