#include "math/update_scale.h"
#include "cpu/cpu_backend.h"

namespace cairn::kernels {

void CpuBackend::update_scale(View scale, View growth_tracker, View hysteresis_tracker,
                              View found_inf, View overflows,
                              const ScaleUpdateOptions& options) const {
  scale_state(scale, growth_tracker, hysteresis_tracker, found_inf, overflows).step(options);
}

}  // namespace cairn::kernels
