// One chunk of an optimizer update, as the vector loops take it.
#pragma once

#include <cstdint>

#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

struct UpdateChunk {
  DType gradient_dtype, weight_dtype;
  const void* gradient;
  void* weight;
  float* master;   // null: the weight is the truth
  float* moment1;  // null: none
  float* moment2;
  std::int64_t count;
  bool streamed;  // a half weight beside a master is written past the caches
};

}  // namespace cairn::kernels
