// A dense tensor as its elements in memory order.
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::parallel {

inline TensorView memory_of(const TensorView& x) {
  TensorView flat(x.data, {x.numel()}, x.dtype, x.device);
  flat.version = x.version;
  return flat;
}

}  // namespace cairn::parallel
