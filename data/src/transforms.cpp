#include "cairn/data/transforms.h"

#include <algorithm>
#include <cstring>

#include "cairn/core/generator.h"

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

std::uint32_t draw_bits() {
  const core::RandomDraw draw = Generator::current().draw();
  return core::philox(draw.seed, draw.offset, 0)[0];
}

/// A whole number of [-most, most], all alike.
std::int64_t draw_shift(std::int64_t most) {
  const auto choices = static_cast<std::uint64_t>(2 * most + 1);
  return static_cast<std::int64_t>((draw_bits() * choices) >> 32) - most;
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
    if (core::uniform_from_bits(draw_bits()) < probability) mirror(image);
  };
}

}  // namespace cairn::data
