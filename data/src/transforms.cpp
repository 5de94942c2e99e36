#include "cairn/data/transforms.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "draws.h"

namespace cairn::data {

namespace {

/// An image's memory: planes of rows, each row gapless.
struct Planes {
  std::byte* data;
  std::int64_t count, height, width;
  std::size_t pixel_bytes;

  std::size_t bytes() const { return offset(count, 0, 0); }
  std::size_t offset(std::int64_t plane, std::int64_t y, std::int64_t x) const {
    return static_cast<std::size_t>((plane * height + y) * width + x) * pixel_bytes;
  }
};

Planes planes_of(const TensorView& image, const char* where) {
  CAIRN_CHECK(image.dims() >= 2 && image.device.is_cpu() && image.is_contiguous(), where,
              "expected a contiguous image [..., H, W] on the CPU, got shape ", image.shape,
              ", strides ", image.strides, " on ", image.device);
  const std::int64_t height = image.size(-2), width = image.size(-1), pixels = height * width;
  return {image.as<std::byte>(), pixels == 0 ? 0 : image.numel() / pixels, height, width,
          size_of(image.dtype)};
}

/// A whole number of [-most, most], all alike.
std::int64_t draw_shift(std::int64_t most) {
  return detail::draw_below(2 * most + 1) - most;
}

/// What was at (y + down, x + right) comes to (y, x); zeros from outside.
void shift(const Planes& image, std::int64_t down, std::int64_t right) {
  const std::vector<std::byte> from(image.data, image.data + image.bytes());
  std::fill_n(image.data, image.bytes(), std::byte{0});
  const std::int64_t top = std::max<std::int64_t>(0, -down),
                     bottom = std::min(image.height, image.height - down),
                     left = std::max<std::int64_t>(0, -right),
                     columns = std::min(image.width, image.width - right) - left;
  if (columns <= 0) return;
  for (std::int64_t plane = 0; plane < image.count; ++plane) {
    for (std::int64_t y = top; y < bottom; ++y) {
      std::memcpy(image.data + image.offset(plane, y, left),
                  from.data() + image.offset(plane, y + down, left + right),
                  static_cast<std::size_t>(columns) * image.pixel_bytes);
    }
  }
}

void mirror(const Planes& image) {
  for (std::int64_t plane = 0; plane < image.count; ++plane) {
    for (std::int64_t y = 0; y < image.height; ++y) {
      for (std::int64_t x = 0; x < image.width / 2; ++x) {
        std::byte* const left = image.data + image.offset(plane, y, x);
        std::swap_ranges(left, left + image.pixel_bytes,
                         image.data + image.offset(plane, y, image.width - 1 - x));
      }
    }
  }
}

std::uint8_t to_byte(float x) {
  return static_cast<std::uint8_t>(std::clamp(x, 0.0f, 255.0f));
}

/// Pixels [3, count] of bytes, in planes.
struct Pixels {
  std::uint8_t* data;
  std::size_t count;

  float grey(std::size_t i) const {
    return 0.2989f * data[i] + 0.587f * data[count + i] + 0.114f * data[2 * count + i];
  }
  float mean_grey() const {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += std::floor(grey(i));
    return static_cast<float>(sum / static_cast<double>(count));
  }
};

/// factor * x + (1 - factor) * other(pixel).
template <class Other>
void blend(const Pixels& pixels, float factor, Other other) {
  for (std::size_t i = 0; i < pixels.count; ++i) {
    const float rest = (1 - factor) * other(i);
    for (std::size_t c = 0; c < 3; ++c) {
      std::uint8_t& x = pixels.data[c * pixels.count + i];
      x = to_byte(factor * x + rest);
    }
  }
}

void change_color(const Pixels& pixels, std::size_t what, float factor) {
  if (what == 0) return blend(pixels, factor, [](std::size_t) { return 0.0f; });
  if (what == 1)
    return blend(pixels, factor, [mean = pixels.mean_grey()](std::size_t) { return mean; });
  blend(pixels, factor, [&](std::size_t i) { return std::floor(pixels.grey(i)); });
}

}  // namespace

TransformedDataset::TransformedDataset(const Dataset& dataset, std::vector<Transform> transforms)
    : dataset_(&dataset), transforms_(std::move(transforms)) {
  for (std::size_t i = 0; i < transforms_.size(); ++i) {
    CAIRN_CHECK(transforms_[i], "transformed_dataset",
                "expected functions, got an empty one as transform ", i);
  }
}

void TransformedDataset::read(std::int64_t index, const TensorView& input,
                              const TensorView& label) const {
  dataset_->read(index, input, label);
  for (const Transform& transform : transforms_) transform(input);
}

Transform random_crop(const RandomCropOptions& options) {
  CAIRN_CHECK(options.padding >= 0, "random_crop", "expected a padding >= 0, got ",
              options.padding);
  return [padding = options.padding](const TensorView& input) {
    const Planes image = planes_of(input, "random_crop");
    const std::int64_t down = draw_shift(padding), right = draw_shift(padding);
    shift(image, down, right);
  };
}

Transform random_horizontal_flip(double probability) {
  CAIRN_CHECK(probability >= 0.0 && probability <= 1.0, "random_horizontal_flip",
              "expected a probability of 0 to 1, got ", probability);
  return [probability](const TensorView& input) {
    const Planes image = planes_of(input, "random_horizontal_flip");
    if (detail::draw_uniform() < probability) mirror(image);
  };
}

Transform color_jitter(const ColorJitterOptions& options) {
  const std::array<double, 3> most{options.brightness, options.contrast, options.saturation};
  for (const double reach : most)
    CAIRN_CHECK(reach >= 0, "color_jitter", "expected changes >= 0, got ", reach);
  return [most](const TensorView& input) {
    CAIRN_CHECK(input.dims() == 3 && input.size(0) == 3 && input.dtype == DType::u8 &&
                    input.device.is_cpu() && input.is_contiguous(),
                "color_jitter", "expected a contiguous u8 image [3, H, W] on the CPU, got ",
                input.dtype, " of shape ", input.shape, " on ", input.device);
    const Pixels pixels{input.as<std::uint8_t>(), static_cast<std::size_t>(input.numel() / 3)};
    std::array<std::size_t, 3> order{0, 1, 2};
    for (std::size_t i : {2u, 1u}) {
      const auto other = detail::draw_below(static_cast<std::int64_t>(i) + 1);
      std::swap(order[i], order[static_cast<std::size_t>(other)]);
    }
    for (const std::size_t what : order) {
      const double low = std::max(0.0, 1 - most[what]), high = 1 + most[what];
      const double factor = low + (high - low) * detail::draw_uniform();
      if (most[what] > 0) change_color(pixels, what, static_cast<float>(factor));
    }
  };
}

}  // namespace cairn::data
