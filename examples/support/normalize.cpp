#include "support/normalize.h"

#include "cairn/kernels/elementwise.h"

namespace support {

using namespace cairn;

Tensor normalize(const Tensor& inputs, const data::Normalize& rule) {
  Tensor y = Tensor::empty(inputs.shape(), DType::f32, inputs.device());
  kernels::copy(inputs, y);
  std::vector<double> scales, shifts;
  for (std::int64_t channel = 0; channel < rule.channels(); ++channel) {
    scales.push_back(rule.scale / rule.deviation.of(channel));
    shifts.push_back(-rule.mean.of(channel) / rule.deviation.of(channel));
  }
  if (scales.size() == 1) {
    kernels::affine(y, scales[0], shifts[0], y);
    return y;
  }
  const Shape each{rule.channels(), 1, 1};  // of images [N, C, H, W]
  kernels::binary(kernels::BinaryOp::mul, y, Tensor::from(scales, each, DType::f32, y.device()), y);
  kernels::binary(kernels::BinaryOp::add, y, Tensor::from(shifts, each, DType::f32, y.device()), y);
  return y;
}

}  // namespace support
