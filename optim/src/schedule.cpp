#include "cairn/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"

namespace cairn::optim {

namespace {

void check_length(const char* where, std::int64_t steps, std::int64_t least) {
  CAIRN_CHECK(steps >= least, where, "expected a length of at least ", least, " steps, got ",
              steps);
}

void check_factor(const char* where, double factor) {
  CAIRN_CHECK(std::isfinite(factor) && factor >= 0, where, "expected a factor >= 0, got ", factor);
}

double progress(std::int64_t step, std::int64_t total) {
  return static_cast<double>(std::min(step, total)) / static_cast<double>(total);
}

}  // namespace

Curve step_decay(std::int64_t step_size, double gamma) {
  check_length("step_decay", step_size, 1);
  check_factor("step_decay", gamma);
  return [=](std::int64_t step) {
    const std::int64_t decays = step / step_size;
    return std::pow(gamma, static_cast<double>(decays));
  };
}

Curve cosine(std::int64_t total_steps, double final_factor) {
  check_length("cosine", total_steps, 1);
  check_factor("cosine", final_factor);
  return [=](std::int64_t step) {
    const double height = 0.5 * (1.0 + std::cos(std::numbers::pi * progress(step, total_steps)));
    return final_factor + (1.0 - final_factor) * height;
  };
}

Curve linear(std::int64_t total_steps, double final_factor) {
  check_length("linear", total_steps, 1);
  check_factor("linear", final_factor);
  return
      [=](std::int64_t step) { return 1.0 + (final_factor - 1.0) * progress(step, total_steps); };
}

Curve cosine_restarts(std::int64_t first_steps, std::int64_t times, double final_factor) {
  check_length("cosine_restarts", first_steps, 1);
  CAIRN_CHECK(times >= 1, "cosine_restarts", "expected times >= 1, got ", times);
  check_factor("cosine_restarts", final_factor);
  return [=](std::int64_t step) {
    std::int64_t length = first_steps;
    for (; step >= length; length *= times) {
      if (times == 1) return cosine(length, final_factor)(step % length);
      step -= length;
    }
    return cosine(length, final_factor)(step);
  };
}

Curve one_cycle(std::int64_t total_steps, const OneCycleOptions& options) {
  check_length("one_cycle", total_steps, 2);
  CAIRN_CHECK(options.rising > 0 && options.rising < 1, "one_cycle",
              "expected a rising part between 0 and 1, got ", options.rising);
  check_factor("one_cycle", options.start_factor);
  check_factor("one_cycle", options.final_factor);
  const double last = static_cast<double>(total_steps - 1);
  const double top = std::max(options.rising * (last + 1) - 1, 1e-9);  // torch's: a step early
  return [=](std::int64_t step) {
    const auto between = [](double from, double to, double share) {
      return to + (from - to) * 0.5 * (1.0 + std::cos(std::numbers::pi * share));
    };
    const double at = std::min(static_cast<double>(step), last);
    if (at <= top) return between(options.start_factor, 1.0, at / top);
    return between(1.0, options.final_factor, (at - top) / (last - top));
  };
}

Curve constant(double factor) {
  check_factor("constant", factor);
  return [=](std::int64_t) { return factor; };
}

Curve warm_up(std::int64_t steps, Curve next) {
  check_length("warm_up", steps, 0);
  const double start = next(0);
  const auto ramp = [=](std::int64_t step) {
    return start * static_cast<double>(step + 1) / static_cast<double>(steps + 1);
  };
  return then(ramp, steps, std::move(next));
}

Curve then(Curve first, std::int64_t steps, Curve next) {
  check_length("then", steps, 0);
  return [=, first = std::move(first), next = std::move(next)](std::int64_t step) {
    return step < steps ? first(step) : next(step - steps);
  };
}

Curve scaled(Curve a, Curve b) {
  return [a = std::move(a), b = std::move(b)](std::int64_t step) { return a(step) * b(step); };
}

Schedule::Schedule(Optimizer& optimizer, Curve curve)
    : optimizer_(&optimizer), curve_(std::move(curve)) {
  CAIRN_CHECK(curve_ != nullptr, "schedule", "expected a curve, got none");
  for (const ParameterGroup& group : optimizer.groups()) base_lr_.push_back(group.lr);
  optimizer.scheduled_ = true;
  apply();
}

void Schedule::apply() {
  optimizer_->check_not_moved();
  for (std::size_t g = 0; g < base_lr_.size(); ++g) {
    optimizer_->groups()[g].lr = base_lr_[g] * factor();
  }
}

void Schedule::step(const StepResult& result) {
  if (!result.applied) return;
  ++position_;
  apply();
}

StateDict Schedule::state_dict() const {
  StateDict state;
  state.set("position", position_);
  StateDict& base = state.make_dict("base_lr");
  for (std::size_t g = 0; g < base_lr_.size(); ++g) base.set(std::to_string(g), base_lr_[g]);
  return state;
}

void Schedule::load_state_dict(const StateDict& state) {
  const std::int64_t position = state.integer("position");
  const StateDict& base = state.dict("base_lr");
  if (position < 0 || base.size() != base_lr_.size()) {
    core::fail<core::DataError>("schedule", "expected a position >= 0 and ", base_lr_.size(),
                                " base learning rates, got ", position, " and ", base.size(),
                                " (nothing was changed)");
  }
  std::vector<double> loaded;
  for (std::size_t g = 0; g < base.size(); ++g) loaded.push_back(base.number(std::to_string(g)));
  for (std::size_t g = 0; g < loaded.size(); ++g) {
    if (loaded[g] == base_lr_[g]) continue;
    log::warn("schedule: group {} continues with lr {} of the state, not {}", g, loaded[g],
              base_lr_[g]);
  }
  base_lr_ = std::move(loaded);
  position_ = position;
  apply();
}

BestMetric::BestMetric(bool higher_is_better, double threshold)
    : higher_is_better_(higher_is_better),
      threshold_(threshold),
      best_(higher_is_better ? -std::numeric_limits<double>::infinity()
                             : std::numeric_limits<double>::infinity()) {}

void BestMetric::add(double metric) {
  ++waited_;
  const double margin = std::isfinite(best_) ? threshold_ * std::abs(best_) : 0.0;
  const bool better = higher_is_better_ ? metric > best_ + margin : metric < best_ - margin;
  if (!better) return;
  best_ = metric;
  waited_ = 0;
}

void BestMetric::save(StateDict& state) const {
  state.set("best", best_);
  state.set("waited", waited_);
}

void BestMetric::load(const StateDict& state, const char* name) {
  const double best = state.number("best");
  const std::int64_t waited = state.integer("waited");
  if (waited < 0) {
    core::fail<core::DataError>(name, "expected a count >= 0, got ", waited,
                                " (nothing was changed)");
  }
  best_ = best;
  waited_ = waited;
}

ReduceOnPlateau::ReduceOnPlateau(Optimizer& optimizer, const PlateauOptions& options)
    : optimizer_(&optimizer),
      options_(options),
      metric_(options.higher_is_better, options.threshold) {
  CAIRN_CHECK(options.factor > 0 && options.factor < 1, "reduce_on_plateau",
              "expected a factor between 0 and 1, got ", options.factor);
  CAIRN_CHECK(options.patience >= 0 && options.cooldown >= 0, "reduce_on_plateau",
              "expected a patience and a cooldown >= 0, got ", options.patience, " and ",
              options.cooldown);
  CAIRN_CHECK(options.threshold >= 0 && options.smallest_lr >= 0, "reduce_on_plateau",
              "expected a threshold and a smallest_lr >= 0, got ", options.threshold, " and ",
              options.smallest_lr);
}

bool ReduceOnPlateau::step(double metric) {
  metric_.add(metric);
  if (cooling_ > 0) {
    --cooling_;
    metric_.wait_anew();
  }
  if (metric_.waited() <= options_.patience) return false;
  cooling_ = options_.cooldown;
  metric_.wait_anew();
  return reduce();
}

bool ReduceOnPlateau::reduce() {
  (void)optimizer_->lr();  // throws where it was moved from
  bool lowered = false;
  for (ParameterGroup& group : optimizer_->groups()) {
    const double lr = std::max(group.lr * options_.factor, options_.smallest_lr);
    lowered = lowered || lr < group.lr;
    group.lr = std::min(lr, group.lr);
  }
  return lowered;
}

StateDict ReduceOnPlateau::state_dict() const {
  StateDict state;
  metric_.save(state);
  state.set("cooling", cooling_);
  return state;
}

void ReduceOnPlateau::load_state_dict(const StateDict& state) {
  const std::int64_t cooling = state.integer("cooling");
  if (cooling < 0) {
    core::fail<core::DataError>("reduce_on_plateau", "expected a count >= 0, got ", cooling,
                                " (nothing was changed)");
  }
  metric_.load(state, "reduce_on_plateau");
  cooling_ = cooling;
}

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options)
    : options_(options), metric_(options.higher_is_better, options.threshold) {
  CAIRN_CHECK(options.patience >= 1 && options.threshold >= 0, "early_stopping",
              "expected a patience >= 1 and a threshold >= 0, got ", options.patience, " and ",
              options.threshold);
}

bool EarlyStopping::step(double metric) {
  metric_.add(metric);
  return stopped();
}

StateDict EarlyStopping::state_dict() const {
  StateDict state;
  metric_.save(state);
  return state;
}

void EarlyStopping::load_state_dict(const StateDict& state) {
  metric_.load(state, "early_stopping");
}

}  // namespace cairn::optim
