// Loss scalers: static, and dynamic with the rule of Apex and torch: halve on overflow, double
// after growth_interval clean steps. Apex has no floor by default and torch neither floor nor
// ceiling; here a scale stays within [min_scale, max_scale].
//
// amp::Amp has one for each loss inside. A trainer with tensors of its own uses it directly:
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
  /// The scale falls at every hysteresis-th overflow and at each one after it, until the count
  /// starts anew: with the next clean step (consecutive_hysteresis: overflows in a row, as Apex's
  /// update_scale_hysteresis), or with the next growth of the scale (Megatron, DeepSpeed).
  int hysteresis = 1;
  bool consecutive_hysteresis = true;
};

class LossScaler : public core::Stateful {
 public:
  /// Throws InvalidArgument for a scale that is not finite and > 0, min_scale > max_scale, growth <
  /// 1, backoff outside (0, 1], an interval or a hysteresis < 1.
  explicit LossScaler(const LossScalerOptions& options = {});
  double scale() const { return scale_; }
  bool dynamic() const { return options_.dynamic; }
  bool at_minimum() const { return !dynamic() || scale_ <= options_.min_scale; }
  /// After each step's check: overflow -> scale = max(min, scale * backoff), where hysteresis
  /// allows it, and count = 0; else count += 1 and, at the interval, scale = min(max, scale *
  /// growth), count = 0. A static scaler never changes.
  void update(bool overflow);
  const LossScalerOptions& options() const { return options_; }

  /// loss_scale, unskipped (Apex's keys), and overflows_left where hysteresis is used.
  StateDict state_dict() const override;
  /// Takes them over, a dynamic scaler's scale within its own bounds. Also reads a state of
  /// torch.amp.GradScaler (scale, _growth_tracker; its factors and interval stay as they are here).
  void load_state_dict(const StateDict& state) override;
  /// As torch.amp.GradScaler.load_state_dict takes it: scale, growth_factor, backoff_factor,
  /// growth_interval, _growth_tracker.
  StateDict torch_state_dict() const;

 private:
  LossScalerOptions options_;
  double scale_ = 65536.0;
  std::int64_t unskipped_ = 0;
  std::int64_t overflows_left_ = 1;  // this many more, and the scale falls
};

}  // namespace cairn::amp
