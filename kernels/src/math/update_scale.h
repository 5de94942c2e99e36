// One step of a loss scale; the formula stands in update_scale.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/kernels/update_scale.h"

namespace cairn::kernels {

/// Where the scale and what goes with it lie.
struct ScaleState {
  float* scale;
  std::int32_t* growth_tracker;
  std::int32_t* hysteresis_tracker;
  const float* found_inf;

  CAIRN_HOST_DEVICE void step(const ScaleUpdateOptions& options) const {
    *found_inf != 0.0f ? overflow(options) : grow(options);
  }

 private:
  CAIRN_HOST_DEVICE void overflow(const ScaleUpdateOptions& options) const {
    *growth_tracker = 0;
    if (*hysteresis_tracker > 0) --*hysteresis_tracker;
    if (*hysteresis_tracker == 0) *scale *= static_cast<float>(options.backoff_factor);
  }
  CAIRN_HOST_DEVICE void grow(const ScaleUpdateOptions& options) const {
    *hysteresis_tracker = options.hysteresis;
    if (++*growth_tracker < options.growth_interval) return;
    *growth_tracker = 0;
    const float grown = *scale * static_cast<float>(options.growth_factor);
    if (grown - grown == 0.0f) *scale = grown;
  }
};

inline ScaleState scale_state(const TensorView& scale, const TensorView& growth_tracker,
                              const TensorView& hysteresis_tracker, const TensorView& found_inf) {
  return {scale.as<float>(), growth_tracker.as<std::int32_t>(),
          hysteresis_tracker.as<std::int32_t>(), found_inf.as<float>()};
}

}  // namespace cairn::kernels
