// LAMB's trust ratio.
#pragma once

#include <cmath>

#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

inline bool is_adaptive(const LambOptions& options) {
  return options.use_nvlamb || options.weight_decay != 0.0;
}

/// lr times the trust ratio |w| / |u|; lr where the ratio is off or one of the norms is 0.
CAIRN_HOST_DEVICE inline double lamb_step(double lr, bool adaptive, const LambNorms& norms) {
  const bool both = norms.weight > 0.0 && norms.update > 0.0;
  return adaptive && both ? lr * ::sqrt(norms.weight / norms.update) : lr;
}

}  // namespace cairn::kernels
