// An optimizer update's list as a backend gets it: checked, and as small as the work needs.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

/// An UpdateEntry of dense tensors of one layout. What is absent, or not used by the rule, is null.
struct UpdateItem {
  void *gradient, *weight, *master, *moment1, *moment2;
  std::int64_t count;  // elements
  double gradient_factor, l2;
  double norm;  // of UpdateEntry; in LAMB's second pass its step length
  DType gradient_dtype, weight_dtype, master_dtype, moment_dtype;
};

struct UpdateList {
  Device device;
  std::vector<UpdateItem> items;
};

}  // namespace cairn::kernels
