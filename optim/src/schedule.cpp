#include "cairn/optim/schedule.h"

#include <algorithm>
#include <cmath>
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

}  // namespace cairn::optim
