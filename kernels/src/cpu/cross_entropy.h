// What the cross-entropy kernels of one instruction set take and give.
#pragma once

#include <cstdint>

#include "cairn/core/dtype.h"

namespace cairn::kernels {

/// Of one row of logits.
struct RowSums {
  double log_sum_exp;
  double sum;
};

/// One row backward: dx = scale (exp(x - log_sum_exp) - q), with q = base everywhere and base +
/// extra at the target. target: -1 where it is none of these classes.
struct LogitGradient {
  DType dtype;
  const void* x;
  void* dx;
  std::int64_t classes, target;
  double log_sum_exp, scale, base, extra;
  bool streamed;  // dx is written past the caches
};

}  // namespace cairn::kernels
