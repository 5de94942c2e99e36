// Which pixels a pooling window covers, and which windows cover a pixel.
#pragma once

#include <algorithm>

#include "cairn/kernels/pool.h"

namespace cairn::kernels {

struct PoolRange {
  std::int64_t begin, end;
};
struct PoolWindow {
  PoolRange h, w;
};

/// Sizes of a pooling of channels-last images.
struct PoolGeometry {
  std::int64_t channels, h, w, out_h, out_w;
  Pool2dOptions options;

  PoolGeometry(const Shape& image, const Shape& pooled, const Pool2dOptions& options)
      : channels(image[1]),
        h(image[2]),
        w(image[3]),
        out_h(pooled[2]),
        out_w(pooled[3]),
        options(options) {}

  std::int64_t image_size() const { return h * w * channels; }
  std::int64_t pooled_size() const { return out_h * out_w * channels; }
  std::int64_t window_reads_per_row() const {
    return out_w * channels * options.kernel[0] * options.kernel[1];
  }
  /// One pixel's part of its window's mean; padding counts.
  double share() const { return 1.0 / static_cast<double>(options.kernel[0] * options.kernel[1]); }

  /// The pixels of the window at (out_h, out_w), without padding.
  PoolWindow window(std::int64_t i, std::int64_t j) const {
    return {covered(i, h, 0), covered(j, w, 1)};
  }
  /// The windows that cover pixel (h, w).
  PoolWindow windows_over(std::int64_t i, std::int64_t j) const {
    return {covering(i, out_h, 0), covering(j, out_w, 1)};
  }

 private:
  PoolRange covered(std::int64_t i, std::int64_t size, std::size_t axis) const {
    const std::int64_t begin = i * options.stride[axis] - options.padding[axis];
    return {std::max<std::int64_t>(begin, 0), std::min(begin + options.kernel[axis], size)};
  }
  PoolRange covering(std::int64_t i, std::int64_t size, std::size_t axis) const {
    const std::int64_t stride = options.stride[axis], last = i + options.padding[axis];
    const std::int64_t first = std::max<std::int64_t>(last - options.kernel[axis] + 1, 0);
    return {(first + stride - 1) / stride, std::min(last / stride + 1, size)};
  }
};

}  // namespace cairn::kernels
