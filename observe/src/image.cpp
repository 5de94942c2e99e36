#include "image.h"

#include <png.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::observe {

namespace {

/// [N, C, H, W] of what may lack the first ones.
struct Pictures {
  std::int64_t count = 1, channels = 1, height = 0, width = 0;
};

Pictures pictures_of(const Tensor& pixels) {
  const core::Shape& shape = pixels.shape();
  const int rank = shape.dims();
  Pictures found;
  if (rank >= 2 && rank <= 4) {
    found.width = shape[rank - 1], found.height = shape[rank - 2];
    if (rank > 2) found.channels = shape[rank - 3];
    if (rank > 3) found.count = shape[0];
  }
  const bool known = pixels.dtype() == DType::u8 || core::is_floating(pixels.dtype());
  CAIRN_CHECK(known && found.count * found.height * found.width > 0 &&
                  (found.channels == 1 || found.channels == 3),
              "observe", "expected pictures [H, W], [C, H, W] or [N, C, H, W] of 1 or 3 channels, ",
              "u8 or floating, got ", core::name(pixels.dtype()), " ", core::str(shape));
  return found;
}

std::uint8_t byte_of(float value, bool bytes) {
  const float level = bytes ? value : 255.0f * value;
  if (std::isnan(level)) return 0;
  return static_cast<std::uint8_t>(std::lround(std::clamp(level, 0.0f, 255.0f)));
}

std::string png_of(const std::vector<std::uint8_t>& rows, const ImageRecord& record) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(record.width);
  image.height = static_cast<png_uint_32>(record.height);
  image.format = record.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string png(size, '\0');
  const int done = png_image_write_to_memory(&image, png.data(), &size, 0, rows.data(), 0, nullptr);
  if (done == 0) core::fail<core::Error>("observe", "libpng: ", image.message);
  png.resize(size);
  return png;
}

}  // namespace

ImageRecord image_record(std::string_view name, const Tensor& pixels) {
  const Pictures in = pictures_of(pixels);
  const auto across =
      static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(in.count))));
  const std::int64_t down = (in.count + across - 1) / across;
  const std::int64_t height = down * in.height, width = across * in.width;
  CAIRN_CHECK(height <= kMostPixels && width <= kMostPixels, "observe",
              "expected pictures of at most ", kMostPixels, " x ", kMostPixels,
              " pixels together, got ", height, " x ", width);
  ImageRecord record{.name = std::string(name),
                     .height = static_cast<int>(height),
                     .width = static_cast<int>(width),
                     .channels = static_cast<int>(in.channels),
                     .png = {}};
  std::vector<std::uint8_t> rows(static_cast<std::size_t>(height * width * in.channels));
  const bool bytes = pixels.dtype() == DType::u8;
  std::size_t next = 0;
  const std::vector<float> values = pixels.to_vector<float>();
  for (std::int64_t n = 0; n < in.count; ++n) {
    const std::int64_t top = n / across * in.height, left = n % across * in.width;
    for (std::int64_t c = 0; c < in.channels; ++c) {
      for (std::int64_t y = 0; y < in.height; ++y) {
        for (std::int64_t x = 0; x < in.width; ++x) {
          const std::int64_t at = ((top + y) * width + left + x) * in.channels + c;
          rows[static_cast<std::size_t>(at)] = byte_of(values[next++], bytes);
        }
      }
    }
  }
  record.png = png_of(rows, record);
  return record;
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const auto byte = [&](std::size_t at) {
      return at < bytes.size() ? static_cast<std::uint8_t>(bytes[at]) : std::uint32_t{0};
    };
    const std::uint32_t three = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    const std::size_t digits = std::min<std::size_t>(bytes.size() - i, 3) + 1;
    for (std::size_t k = 0; k < 4; ++k)
      text += k < digits ? kDigits[three >> (18 - 6 * k) & 63] : '=';
  }
  return text;
}

}  // namespace cairn::observe
