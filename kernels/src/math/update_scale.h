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

  std::int32_t* overflows;  // or nullptr

  CAIRN_HOST_DEVICE void step(const ScaleUpdateOptions& options) const {
    const bool overflowed = *found_inf != 0.0f;
    if (overflows != nullptr) count(overflowed, *scale <= static_cast<float>(options.min_scale));
    overflowed ? overflow(options) : grow(options);
  }

 private:
  CAIRN_HOST_DEVICE void count(bool overflowed, bool at_minimum) const {
    if (overflowed) ++overflows[0];
    overflows[1] = overflowed && at_minimum ? overflows[1] + 1 : 0;
  }
  CAIRN_HOST_DEVICE void overflow(const ScaleUpdateOptions& options) const {
    *growth_tracker = 0;
    if (*hysteresis_tracker > 0) --*hysteresis_tracker;
    if (*hysteresis_tracker > 0) return;
    const float less = *scale * static_cast<float>(options.backoff_factor);
    const float least = static_cast<float>(options.min_scale);
    *scale = less > least ? less : least;
  }
  CAIRN_HOST_DEVICE void grow(const ScaleUpdateOptions& options) const {
    if (options.consecutive_hysteresis) *hysteresis_tracker = options.hysteresis;
    if (++*growth_tracker < options.growth_interval) return;
    *growth_tracker = 0;
    *hysteresis_tracker = options.hysteresis;
    const float more = *scale * static_cast<float>(options.growth_factor);
    const float most = static_cast<float>(options.max_scale);
    if (more - more == 0.0f) *scale = more < most ? more : most;
  }
};

inline ScaleState scale_state(const TensorView& scale, const TensorView& growth_tracker,
                              const TensorView& hysteresis_tracker, const TensorView& found_inf,
                              const TensorView& overflows) {
  return {scale.as<float>(), growth_tracker.as<std::int32_t>(),
          hysteresis_tracker.as<std::int32_t>(), found_inf.as<float>(),
          overflows.as<std::int32_t>()};
}

}  // namespace cairn::kernels
