#include "cairn/amp/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"

namespace cairn::amp {

namespace {

void check(const LossScalerOptions& o) {
  const auto is_scale = [](double scale) { return std::isfinite(scale) && scale > 0; };
  CAIRN_CHECK(is_scale(o.init_scale), "loss_scaler", "expected a finite init_scale > 0, got ",
              o.init_scale);
  if (!o.dynamic) return;
  CAIRN_CHECK(is_scale(o.min_scale) && is_scale(o.max_scale) && o.min_scale <= o.max_scale,
              "loss_scaler", "expected 0 < min_scale <= max_scale, got ", o.min_scale, " and ",
              o.max_scale);
  CAIRN_CHECK(o.growth_factor >= 1 && std::isfinite(o.growth_factor), "loss_scaler",
              "expected a growth_factor >= 1, got ", o.growth_factor);
  CAIRN_CHECK(o.backoff_factor > 0 && o.backoff_factor <= 1, "loss_scaler",
              "expected a backoff_factor in (0, 1], got ", o.backoff_factor);
  CAIRN_CHECK(o.growth_interval >= 1, "loss_scaler", "expected a growth_interval >= 1, got ",
              o.growth_interval);
  CAIRN_CHECK(o.hysteresis >= 1, "loss_scaler", "expected a hysteresis >= 1, got ", o.hysteresis);
}

double clamp(double scale, const LossScalerOptions& o) {
  return o.dynamic ? std::clamp(scale, o.min_scale, o.max_scale) : scale;
}

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options)
    : options_(options), overflows_left_(options.hysteresis) {
  check(options);
  scale_ = clamp(options.init_scale, options);
}

void LossScaler::update(bool overflow) {
  if (!options_.dynamic) return;
  if (overflow) {
    unskipped_ = 0;
    if (--overflows_left_ > 0) return;
    overflows_left_ = 0;
    scale_ = std::max(options_.min_scale, scale_ * options_.backoff_factor);
    return;
  }
  if (options_.consecutive_hysteresis) overflows_left_ = options_.hysteresis;
  if (++unskipped_ < options_.growth_interval) return;
  scale_ = std::min(options_.max_scale, scale_ * options_.growth_factor);
  unskipped_ = 0;
  overflows_left_ = options_.hysteresis;
}

StateDict LossScaler::state_dict() const {
  StateDict state;
  state.set("loss_scale", scale_);
  state.set("unskipped", unskipped_);
  if (options_.hysteresis > 1) state.set("overflows_left", overflows_left_);
  return state;
}

StateDict LossScaler::torch_state_dict() const {
  StateDict state;
  state.set("scale", scale_);
  state.set("growth_factor", options_.growth_factor);
  state.set("backoff_factor", options_.backoff_factor);
  state.set("growth_interval", options_.growth_interval);
  state.set("_growth_tracker", unskipped_);
  return state;
}

void LossScaler::load_state_dict(const StateDict& state) {
  const bool torch = state.contains("_growth_tracker");
  const double scale = state.number(torch ? "scale" : "loss_scale");
  const std::int64_t unskipped = state.integer(torch ? "_growth_tracker" : "unskipped");
  const std::int64_t left = state.contains("overflows_left") ? state.integer("overflows_left")
                                                             : std::int64_t{options_.hysteresis};
  if (!std::isfinite(scale) || scale <= 0 || unskipped < 0 || left < 0) {
    core::fail<core::DataError>("loss_scaler", "expected a loss_scale > 0, unskipped >= 0 and ",
                                "overflows_left >= 0, got ", scale, ", ", unskipped, " and ", left,
                                " (nothing was changed)");
  }
  scale_ = clamp(scale, options_);
  unskipped_ = unskipped;
  overflows_left_ = std::min<std::int64_t>(left, options_.hysteresis);
}

}  // namespace cairn::amp
