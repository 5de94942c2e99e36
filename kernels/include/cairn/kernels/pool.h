// 2-D pooling on [N, C, H, W], any storage order (channels-last is fast).
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

struct Pool2dOptions {
  std::array<std::int64_t, 2> kernel{2, 2};
  std::array<std::int64_t, 2> stride{2, 2};
  std::array<std::int64_t, 2> padding{0, 0};
  /// Adaptive, of max_pool2d alone: the result's size OH, OW. Window i of OH begins at floor(i H /
  /// OH) and ends before ceil((i + 1) H / OH), so windows may overlap; the other options do not
  /// count. Means over the same windows: resample2d (area).
  std::optional<std::array<std::int64_t, 2>> output = {};
};

Shape pool2d_shape(const Shape& x, const Pool2dOptions& options);  // floor mode
/// y = max over each window (the first of equals; NaN wins). index [N, C, OH, OW] i32, same storage
/// order as y: h * W + w of the winner.
void max_pool2d(const TensorView& x, const TensorView& y, const TensorView& index,
                const Pool2dOptions& options);
void max_pool2d_backward(const TensorView& dy, const TensorView& index, const TensorView& dx,
                         const Pool2dOptions& options);
/// Mean over each window, padding counted as zeros (torch's count_include_pad). Global pooling:
/// kernel = the image's size.
void avg_pool2d(const TensorView& x, const TensorView& y, const Pool2dOptions& options);
void avg_pool2d_backward(const TensorView& dy, const TensorView& dx, const Pool2dOptions& options);

}  // namespace cairn::kernels
