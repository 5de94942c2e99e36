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
/// From 1 to final_factor along half a cosine over first_steps, then again from 1 over `times` as
/// many steps, and so on (Loshchilov & Hutter 2017; torch's CosineAnnealingWarmRestarts).
Curve cosine_restarts(std::int64_t first_steps, std::int64_t times = 1, double final_factor = 0.0);

struct OneCycleOptions {
  double rising = 0.3;         // of all steps
  double start_factor = 0.04;  // 1 / torch's div_factor
  double final_factor = 4e-6;  // torch's: start_factor / 1e4
};
/// From start_factor up to 1 and down to final_factor at the last of total_steps, each along half a
/// cosine, then constant (Smith & Topin 2019; torch's OneCycleLR of max_lr 1).
Curve one_cycle(std::int64_t total_steps, const OneCycleOptions& options = {});
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

/// A metric that should get better, and for how long it has not. One that is not a number is no
/// better.
class BestMetric {
 public:
  /// Better: by more than `threshold` times the best's magnitude.
  BestMetric(bool higher_is_better, double threshold);

  void add(double metric);
  double best() const { return best_; }            // an infinity before the first
  std::int64_t waited() const { return waited_; }  // metrics since the best
  void wait_anew() { waited_ = 0; }

  void save(StateDict& state) const;                    // "best", "waited"
  void load(const StateDict& state, const char* name);  // throws DataError, and changes nothing

 private:
  bool higher_is_better_;
  double threshold_, best_;
  std::int64_t waited_ = 0;
};

struct PlateauOptions {
  double factor = 0.1;      // of every group's learning rate, each time
  int patience = 10;        // metrics in a row that may be no better
  double threshold = 1e-4;  // better: by more than this share of the best
  int cooldown = 0;         // metrics after a reduction that do not count
  double smallest_lr = 0.0;
  bool higher_is_better = false;  // an accuracy; false: a loss
};

/// Lowers learning rates where a metric stops getting better: torch's ReduceLROnPlateau.
///
///   optim::ReduceOnPlateau plateau(optimizer, {.patience = 3});
///   plateau.step(loss.item());   // a validation loss, after each epoch; the same on every rank
class ReduceOnPlateau : public core::Stateful {
 public:
  /// The optimizer must outlive it. Throws InvalidArgument for options that make no sense.
  explicit ReduceOnPlateau(Optimizer& optimizer, const PlateauOptions& options = {});

  /// Whether it lowered a learning rate. A metric that is not a number is no better.
  bool step(double metric);
  double best() const { return metric_.best(); }

  StateDict state_dict() const override;  // best, waited, cooling; rates are in the optimizer's
  void load_state_dict(const StateDict& state) override;

 private:
  bool reduce();

  Optimizer* optimizer_;
  PlateauOptions options_;
  BestMetric metric_;
  std::int64_t cooling_ = 0;  // metrics
};

struct EarlyStoppingOptions {
  int patience = 3;        // so many metrics in a row are no better: it stops
  double threshold = 0.0;  // better: by more than this share of the best
  bool higher_is_better = false;
};

/// Ends a training whose metric has stopped getting better: Lightning's EarlyStopping.
///
///   optim::EarlyStopping stopping({.patience = 5, .higher_is_better = true});
///   for (int epoch = 0; epoch < 90; ++epoch) {
///     const double accuracy = train_epoch();  // the same on every rank
///     if (stopping.step(accuracy)) break;
///   }
class EarlyStopping : public core::Stateful {
 public:
  /// Throws InvalidArgument for options that make no sense.
  explicit EarlyStopping(const EarlyStoppingOptions& options = {});

  /// Whether to stop.
  bool step(double metric);
  /// What step() said last; a run that resumes asks it before it trains.
  bool stopped() const { return metric_.waited() >= options_.patience; }
  double best() const { return metric_.best(); }

  StateDict state_dict() const override;  // best, waited
  void load_state_dict(const StateDict& state) override;

 private:
  EarlyStoppingOptions options_;
  BestMetric metric_;
};

}  // namespace cairn::optim
