#include "device_scaler.h"

#include <limits>

#include "cairn/core/error.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/update_scale.h"

namespace cairn::amp {

namespace {

kernels::ScaleUpdateOptions update_options(const LossScalerOptions& o) {
  return {.growth_factor = o.dynamic ? o.growth_factor : 1.0,
          .backoff_factor = o.dynamic ? o.backoff_factor : 1.0,
          .growth_interval = static_cast<std::int32_t>(o.growth_interval),
          .hysteresis = o.hysteresis,
          .consecutive_hysteresis = o.consecutive_hysteresis,
          .min_scale = o.dynamic ? o.min_scale : o.init_scale,
          .max_scale = o.dynamic ? o.max_scale : o.init_scale};
}

}  // namespace

DeviceScaler::DeviceScaler(const LossScaler& scaler, Device device)
    : scale_(Tensor::zeros({1}, DType::f32, device)),
      growth_(Tensor::zeros({1}, DType::i32, device)),
      hysteresis_(Tensor::zeros({1}, DType::i32, device)),
      overflows_(Tensor::zeros({2}, DType::i32, device)),
      options_(scaler.options()) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (options_.growth_interval > kMost) {
    core::fail<core::Unsupported>("loss_scaler", "expected a growth_interval of at most ", kMost,
                                  " on a device, got ", options_.growth_interval);
  }
}

void DeviceScaler::update(const TensorView& found_inf) {
  kernels::update_scale(scale_, growth_, hysteresis_, found_inf, update_options(options_),
                        overflows_);
}

void DeviceScaler::write(const LossScaler& scaler) {
  const StateDict state = scaler.state_dict();
  const bool counts = state.contains("overflows_left");
  kernels::fill(scale_, scaler.scale());
  kernels::fill(growth_, static_cast<double>(state.integer("unskipped")));
  kernels::fill(hysteresis_, counts ? static_cast<double>(state.integer("overflows_left")) : 1.0);
  kernels::fill(overflows_, 0.0);
}

void DeviceScaler::read(LossScaler& scaler) const {
  if (!scaler.dynamic()) return;
  StateDict state;
  state.set("loss_scale", scale_.item());
  state.set("unskipped", static_cast<std::int64_t>(growth_.item()));
  if (options_.hysteresis > 1) {
    state.set("overflows_left", static_cast<std::int64_t>(hysteresis_.item()));
  }
  scaler.load_state_dict(state);
}

DeviceScaler::Overflows DeviceScaler::overflows() const {
  const std::vector<std::int64_t> counts = overflows_.to_vector<std::int64_t>();
  return {counts[0], counts[1]};
}

}  // namespace cairn::amp
