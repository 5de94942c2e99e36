#include "picture.h"

#include <png.h>
#include <turbojpeg.h>

#include <cstring>
#include <memory>
#include <string_view>

#include "cairn/core/error.h"
#include "file_bytes.h"

namespace cairn::data::detail {

namespace {

constexpr std::int64_t kMostPixels = std::int64_t{1} << 27;

bool starts_with(const std::string& bytes, std::string_view magic) {
  return bytes.compare(0, magic.size(), magic) == 0;
}

struct JpegDecoder {
  JpegDecoder() : handle(tjInitDecompress(), tjDestroy) {}
  std::unique_ptr<void, decltype(&tjDestroy)> handle;
  std::string error() const { return tjGetErrorStr2(handle.get()); }
};

const unsigned char* unsigned_bytes(const std::string& bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

/// Adobe's, which store the complement of each ink.
std::vector<std::uint8_t> rgb_of_cmyk(const std::vector<std::uint8_t>& inks) {
  std::vector<std::uint8_t> rgb;
  rgb.reserve(inks.size() / 4 * 3);
  for (std::size_t pixel = 0; pixel < inks.size(); pixel += 4) {
    for (std::size_t c = 0; c < 3; ++c)
      rgb.push_back(static_cast<std::uint8_t>((inks[pixel + c] * inks[pixel + 3] + 127) / 255));
  }
  return rgb;
}

struct PngDecoder {
  PngDecoder() {
    std::memset(&image, 0, sizeof image);
    image.version = PNG_IMAGE_VERSION;
  }
  ~PngDecoder() { png_image_free(&image); }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;
  png_image image;
};

}  // namespace

EncodedPicture::EncodedPicture(const std::string& path)
    : path_(path), bytes_(read_file(path, "read_image")) {
  jpeg_ = starts_with(bytes_, "\xff\xd8\xff");
  if (jpeg_) {
    read_jpeg_header();
  } else if (starts_with(bytes_, "\x89PNG\r\n\x1a\n")) {
    read_png_header();
  } else {
    core::fail<core::DataError>("read_image", "expected a JPEG or a PNG file, got '", path,
                                "', which starts as neither");
  }
  if (height_ <= kMostPixels / width_) return;
  core::fail<core::DataError>("read_image", "expected at most ", kMostPixels, " pixels, got ",
                              height_, " x ", width_, " in '", path, "'");
}

void EncodedPicture::fail_with(const std::string& what) const {
  core::fail<core::DataError>("read_image", "expected a sound ", jpeg_ ? "JPEG" : "PNG",
                              " file, got '", path_, "': ", what);
}

void EncodedPicture::read_jpeg_header() {
  const JpegDecoder decoder;
  int width = 0, height = 0, chroma = 0, colors = 0;
  if (tjDecompressHeader3(decoder.handle.get(), unsigned_bytes(bytes_), bytes_.size(), &width,
                          &height, &chroma, &colors) != 0) {
    fail_with(decoder.error());
  }
  if (height <= 0 || width <= 0) fail_with("it ends in its header");
  height_ = height;
  width_ = width;
  cmyk_ = colors == TJCS_CMYK || colors == TJCS_YCCK;
}

void EncodedPicture::read_png_header() {
  PngDecoder decoder;
  if (png_image_begin_read_from_memory(&decoder.image, bytes_.data(), bytes_.size()) == 0)
    fail_with(decoder.image.message);
  height_ = decoder.image.height;
  width_ = decoder.image.width;
}

Picture EncodedPicture::decode(int reduction) const {
  return jpeg_ ? decode_jpeg(reduction) : decode_png();
}

Picture EncodedPicture::decode_jpeg(int reduction) const {
  const JpegDecoder decoder;
  Picture picture{(height_ + reduction - 1) / reduction, (width_ + reduction - 1) / reduction, {}};
  const int channels = cmyk_ ? 4 : 3;
  picture.rgb.resize(static_cast<std::size_t>(picture.height * picture.width * channels));
  const int status = tjDecompress2(
      decoder.handle.get(), unsigned_bytes(bytes_), bytes_.size(), picture.rgb.data(),
      static_cast<int>(picture.width), static_cast<int>(picture.width) * channels,
      static_cast<int>(picture.height), cmyk_ ? TJPF_CMYK : TJPF_RGB, TJFLAG_ACCURATEDCT);
  // Of what it only warns of, a file that ends too early lacks pixels.
  const bool warned = status != 0 && tjGetErrorCode(decoder.handle.get()) == TJERR_WARNING;
  const bool short_of = warned && decoder.error().find("Premature end") != std::string::npos;
  if (status != 0 && (!warned || short_of)) fail_with(decoder.error());
  if (cmyk_) picture.rgb = rgb_of_cmyk(picture.rgb);
  return picture;
}

/// Transparent pixels keep the colour that they hide.
Picture EncodedPicture::decode_png() const {
  PngDecoder decoder;
  png_image& image = decoder.image;
  std::vector<std::uint8_t> rgba(static_cast<std::size_t>(height_ * width_ * 4));
  bool sound = png_image_begin_read_from_memory(&image, bytes_.data(), bytes_.size()) != 0;
  image.format = PNG_FORMAT_RGBA;
  image.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  sound = sound && png_image_finish_read(&image, nullptr, rgba.data(), 0, nullptr) != 0;
  if (!sound) fail_with(image.message);
  Picture picture{height_, width_, {}};
  picture.rgb.reserve(rgba.size() / 4 * 3);
  for (std::size_t pixel = 0; pixel < rgba.size(); pixel += 4)
    picture.rgb.insert(picture.rgb.end(), {rgba[pixel], rgba[pixel + 1], rgba[pixel + 2]});
  return picture;
}

}  // namespace cairn::data::detail
