// PyTorch's default initial values of a layer.
#pragma once

#include <cmath>

#include "cairn/nn/init.h"

namespace cairn::nn {

/// A weight [O, I, ...] uniform in +-1 / sqrt(fan_in).
inline Tensor default_weight(const Shape& shape) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  Tensor weight = Tensor::empty(shape);
  init::kaiming_uniform(weight, std::sqrt(5.0));
  return weight;
}

/// A bias of a layer with that weight, of the same spread.
inline Tensor default_bias(std::int64_t size, const Shape& weight) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  Tensor bias = Tensor::zeros({size});
  const std::int64_t fan = init::fan_in(weight);
  const double bound = fan > 0 ? 1.0 / std::sqrt(static_cast<double>(fan)) : 0.0;
  if (fan > 0) init::uniform(bias, -bound, bound);
  return bias;
}

inline Tensor constant_parameter(std::int64_t size, double value) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  return Tensor::full({size}, value);
}

}  // namespace cairn::nn
