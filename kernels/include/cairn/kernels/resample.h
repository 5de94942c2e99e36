// Images of another size: upsampling by the nearest pixel or bilinearly, and means of areas
// (adaptive average pooling). [N, C, H, W], any storage order (channels-last is fast). The rules of
// elementwise.h hold.
#pragma once

#include <cstdint>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// Which of n pixels along a dimension make up pixel i of m.
enum class ResampleMode : std::uint8_t {
  nearest,   // pixel floor(i n / m)
  bilinear,  // the two beside (i + 1/2) n / m - 1/2, by their distance
  area       // the mean of floor(i n / m) .. ceil((i + 1) n / m) - 1
};
struct ResampleOptions {
  ResampleMode mode = ResampleMode::nearest;
  /// bilinear: the corners' centres are fixed, i (n - 1) / (m - 1), instead of their outer edges.
  bool align_corners = false;
};

/// y from x, both of at least one pixel a side; N, C and dtype are the same.
void resample2d(const TensorView& x, const TensorView& y, const ResampleOptions& options);
void resample2d_backward(const TensorView& dy, const TensorView& dx,
                         const ResampleOptions& options);

}  // namespace cairn::kernels
