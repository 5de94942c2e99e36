// A dynamic loss scale that lives on the device.
#pragma once

#include <cstdint>
#include <limits>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// How a dynamic loss scale moves.
struct ScaleUpdateOptions {
  double growth_factor = 2.0;   // >= 1
  double backoff_factor = 0.5;  // in (0, 1]
  std::int32_t growth_interval = 2000;
  std::int32_t hysteresis = 1;  // overflows before the scale backs off
  /// What fills the count of overflows again: every clean step, or only growth.
  bool consecutive_hysteresis = true;
  double min_scale = 0.0, max_scale = std::numeric_limits<float>::max();
};
/// One step of a loss scale that lives on the device: no host reads it. [1] each.
///   found_inf != 0: growth_tracker = 0, hysteresis_tracker falls by 1 (not below 0); where that
///     leaves it 0, scale = max(min_scale, scale * backoff_factor)
///   else: growth_tracker += 1; at growth_interval it becomes 0 and scale = min(max_scale, scale *
///     growth_factor), unless that overflows f32; hysteresis_tracker = hysteresis, also where only
///     growth refills it
/// As Apex's amp_C.update_scale_hysteresis: hysteresis_tracker starts at `hysteresis`, and only a
/// step without overflow fills it again. f32, i32, i32, f32. overflows, i32 [2], may be absent: +=
/// 1 at each overflow; and those in a row that found the scale at min_scale, 0 after any other
/// step.
void update_scale(const TensorView& scale, const TensorView& growth_tracker,
                  const TensorView& hysteresis_tracker, const TensorView& found_inf,
                  const ScaleUpdateOptions& options = {}, const TensorView& overflows = {});

}  // namespace cairn::kernels
