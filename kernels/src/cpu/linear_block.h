// A run of out = a x + b y, as the vector loops take it.
#pragma once

#include <cstdint>

#include "cairn/core/dtype.h"

namespace cairn::kernels {

struct LinearBlock {
  DType x_dtype, y_dtype, out_dtype;
  void* x;  // x and y are only read
  void* y;  // null: out = a x
  void* out;
  std::int64_t count;
  double a, b;
};

}  // namespace cairn::kernels
