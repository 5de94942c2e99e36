// Learning-rate schedules. A Curve maps the number of applied steps to a factor of each group's
// base learning rate; curves compose; a Schedule drives an optimizer along one. Skipped steps do
// not count.
//
//   optim::Schedule schedule(optimizer, optim::warm_up(500, optim::cosine(10'000)));
//   autograd::backward(loss);
//   schedule.step(optimizer.step());   // or of what amp's step() returns
//
// All lengths are applied optimizer steps.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/optim/optimizer.h"

namespace cairn::optim {

/// The factor after `step` applied steps (0: before the first).
using Curve = std::function<double(std::int64_t step)>;

/// gamma ^ floor(step / step_size): torch's StepLR.
Curve step_decay(std::int64_t step_size, double gamma = 0.1);
/// From 1 to final_factor over total_steps along half a cosine, then constant:
/// final + (1 - final) (1 + cos(pi step / total)) / 2 (Loshchilov & Hutter 2017, without restarts).
Curve cosine(std::int64_t total_steps, double final_factor = 0.0);
/// From 1 to final_factor over total_steps in a straight line, then constant.
Curve linear(std::int64_t total_steps, double final_factor = 0.0);
Curve constant(double factor = 1.0);
/// (step + 1) / (steps + 1) of the next curve's start during `steps` steps, then `next` from its 0.
/// The first step has a learning rate above zero, the first one after the warm-up the full one.
Curve warm_up(std::int64_t steps, Curve next = constant());
/// `first` during `steps` steps, then `next` from its 0.
Curve then(Curve first, std::int64_t steps, Curve next);
/// The product of two curves.
Curve scaled(Curve a, Curve b);

/// Sets every group's learning rate to its base rate (what it was when the schedule was made) times
/// the curve's factor, now and after each applied step.
class Schedule : public core::Stateful {
 public:
  /// The optimizer must outlive the schedule. Groups added later are not driven.
  Schedule(Optimizer& optimizer, Curve curve);

  void step(const StepResult& result);                 // does nothing where the step was skipped
  std::int64_t position() const { return position_; }  // applied steps
  double factor() const { return curve_(position_); }

  StateDict state_dict() const override;  // position, base_lr by group
  /// Also sets the learning rates, so it may come before or after the optimizer's own load. Takes
  /// the base rates of the state, with a warning that names both where they differ from these.
  void load_state_dict(const StateDict& state) override;

 private:
  void apply();

  Optimizer* optimizer_;
  Curve curve_;
  std::vector<double> base_lr_;
  std::int64_t position_ = 0;
};

}  // namespace cairn::optim
