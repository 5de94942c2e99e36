// What the norm kernels of one instruction set take; A is float, or double for f64.
#pragma once

#include <cstdint>

#include "cairn/core/dtype.h"

namespace cairn::kernels {

/// One row forward. layer_norm centres, rms_norm does not and has no bias.
struct NormForward {
  DType dtype;
  bool centred;
  double eps;
  const void* x;
  void* y;
  const void* weight;  // A, never null
  const void* bias;    // A, never null
  std::int64_t width;
};
struct NormStatistics {
  double mean, rstd;
};

/// One row backward; adds to dweight and dbias.
struct NormBackward {
  DType dtype;
  bool centred;
  NormStatistics statistics;
  const void* x;
  const void* dy;
  void* dx;            // null: not wanted
  const void* weight;  // A, never null
  void* dweight;       // A, never null
  void* dbias;         // A, never null
  std::int64_t width;
};

}  // namespace cairn::kernels
