// Loss scalers: static, and dynamic with the rule of Apex and torch: halve on overflow, double
// after growth_interval clean steps. Apex has no floor by default and torch neither floor nor
// ceiling; here a collapse stops at min_scale.
//
// amp::Amp has one inside. A trainer with tensors of its own uses it directly:
//
//   amp::LossScaler scaler;
//   // loss * scaler.scale(), backward, then:
//   optim::StepResult r = optimizer.step({.gradient_scale = 1 / scaler.scale()});
//   scaler.update(!r.applied);
#pragma once

#include <cstdint>

#include "cairn/core/state_dict.h"

namespace cairn::amp {

struct LossScalerOptions {
  bool dynamic = true;
  double init_scale = 65536.0;  // 2^16; the scale of a static one
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  double min_scale = 1.0;
  double max_scale = 16777216.0;  // 2^24
};

class LossScaler : public core::Stateful {
 public:
  /// Throws InvalidArgument for a scale that is not finite and > 0, min_scale > max_scale, growth <
  /// 1, backoff outside (0, 1] or an interval < 1.
  explicit LossScaler(const LossScalerOptions& options = {});
  double scale() const { return scale_; }
  bool dynamic() const { return options_.dynamic; }
  /// After each step's check: overflow -> scale = max(min, scale * backoff), count = 0; else count
  /// += 1 and, at the interval, scale = min(max, scale * growth), count = 0. A static scaler never
  /// changes.
  void update(bool overflow);
  const LossScalerOptions& options() const { return options_; }

  StateDict state_dict() const override;  // loss_scale, unskipped
  /// Takes both over; a dynamic scaler's scale within its own bounds.
  void load_state_dict(const StateDict& state) override;

 private:
  LossScalerOptions options_;
  double scale_ = 65536.0;
  std::int64_t unskipped_ = 0;
};

}  // namespace cairn::amp
