// 2-D convolution (cross-correlation, as every framework has it): oneDNN on the CPU, cuDNN on CUDA.
//
// Images are [N, C, H, W] in shape; channels-last storage (N H W C) is what the kernels want and
// what outputs made by `conv2d_output` have. Other layouts are reordered inside. Weights are [O, I
// / groups, kH, kW], row-major.
#pragma once

#include <array>

#include "cairn/core/tensor.h"

namespace cairn::kernels {

struct Conv2dOptions {
  std::array<std::int64_t, 2> stride{1, 1};
  std::array<std::int64_t, 2> padding{0, 0};
  std::array<std::int64_t, 2> dilation{1, 1};
  std::int64_t groups = 1;
};

/// [N, O, OH, OW]; OH = (H + 2 padding - dilation (kH - 1) - 1) / stride + 1. Throws where the
/// sizes do not fit.
Shape conv2d_shape(const Shape& x, const Shape& weight, const Conv2dOptions& options);
/// y = conv(x, weight) + bias[O]; bias may be undefined.
void conv2d(const TensorView& x, const TensorView& weight, const TensorView& bias,
            const TensorView& y, const Conv2dOptions& options);
/// dx from dy: also the forward of a transposed convolution (dy is its input, dx its output; bias
/// [I] then may be given).
void conv2d_backward_data(const TensorView& dy, const TensorView& weight, const TensorView& bias,
                          const TensorView& dx, const Conv2dOptions& options);
/// dweight (+)= , dbias[O] (+)= ; dbias may be undefined. dweight may be f32 with half x and dy.
void conv2d_backward_weight(const TensorView& x, const TensorView& dy, const TensorView& dweight,
                            const TensorView& dbias, const Conv2dOptions& options, bool accumulate);

}  // namespace cairn::kernels
