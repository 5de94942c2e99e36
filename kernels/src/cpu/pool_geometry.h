// Which pixels a pooling window covers, and which windows cover a pixel.
#pragma once

#include <algorithm>
#include <vector>

#include "cairn/kernels/pool.h"

namespace cairn::kernels {

struct PoolRange {
  std::int64_t begin, end;
};
struct PoolWindow {
  PoolRange h, w;
};

/// From one grid of pixels [N, height, width, C] to another: the ranges of pixels that each target
/// pixel reads. Forward: the window of a pooled pixel. Backward: the pooled pixels whose windows
/// cover a pixel.
class PoolGeometry {
 public:
  static PoolGeometry forward(const Shape& image, const Shape& pooled, const Pool2dOptions& o) {
    return PoolGeometry(image, pooled, o, &PoolGeometry::covered);
  }
  static PoolGeometry backward(const Shape& image, const Shape& pooled, const Pool2dOptions& o) {
    return PoolGeometry(pooled, image, o, &PoolGeometry::covering);
  }

  std::int64_t channels() const { return channels_; }
  std::int64_t source_width() const { return source_[3]; }
  std::int64_t source_size() const { return source_[2] * source_[3] * channels_; }  // of one image
  std::int64_t target_height() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t target_width() const { return static_cast<std::int64_t>(columns_.size()); }
  PoolWindow window(std::int64_t h, std::int64_t w) const {
    return {rows_[static_cast<std::size_t>(h)], columns_[static_cast<std::size_t>(w)]};
  }
  /// One pixel's part of its window's mean; padding counts.
  double share() const {
    return 1.0 / static_cast<double>(options_.kernel[0] * options_.kernel[1]);
  }
  /// Elements a target row reads, or writes where that is more.
  std::int64_t work_per_row() const {
    std::int64_t pixels = target_width();
    const std::int64_t rows = rows_.empty() ? 0 : rows_[0].end - rows_[0].begin;
    for (const PoolRange& c : columns_) pixels += (c.end - c.begin) * rows;
    return pixels * channels_;
  }

 private:
  using Ranges = PoolRange (PoolGeometry::*)(std::int64_t, std::size_t) const;

  PoolGeometry(const Shape& source, const Shape& target, const Pool2dOptions& options,
               Ranges ranges)
      : channels_(source[1]), source_(source), options_(options) {
    if (options
            .output) {  // either way: windows over a pixel are pixels under a window, turned round
      for (std::int64_t i = 0; i < target[2]; ++i)
        rows_.push_back(adaptive(i, source[2], target[2]));
      for (std::int64_t i = 0; i < target[3]; ++i) {
        columns_.push_back(adaptive(i, source[3], target[3]));
      }
      return;
    }
    for (std::int64_t i = 0; i < target[2]; ++i) rows_.push_back((this->*ranges)(i, 0));
    for (std::int64_t i = 0; i < target[3]; ++i) columns_.push_back((this->*ranges)(i, 1));
  }
  static PoolRange adaptive(std::int64_t i, std::int64_t from, std::int64_t to) {
    return {i * from / to, ((i + 1) * from + to - 1) / to};
  }
  PoolRange covered(std::int64_t i, std::size_t axis) const {
    const std::int64_t begin = i * options_.stride[axis] - options_.padding[axis];
    return {std::max<std::int64_t>(begin, 0),
            std::min(begin + options_.kernel[axis], source_[static_cast<int>(axis) + 2])};
  }
  PoolRange covering(std::int64_t i, std::size_t axis) const {
    const std::int64_t stride = options_.stride[axis], last = i + options_.padding[axis];
    const std::int64_t first = std::max<std::int64_t>(last - options_.kernel[axis] + 1, 0);
    return {(first + stride - 1) / stride,
            std::min(last / stride + 1, source_[static_cast<int>(axis) + 2])};
  }

  std::int64_t channels_;
  Shape source_;
  Pool2dOptions options_;
  std::vector<PoolRange> rows_, columns_;
};

}  // namespace cairn::kernels
