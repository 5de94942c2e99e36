// What an update reads of a DeviceStep, where it lies, and what becomes of a rule's options then:
// kernels and the CPU backend share it.
#pragma once

#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

struct StepState {
  const double* lr;
  const std::int32_t* step;
  const float* loss_scale;  // or nullptr
  const float* found_inf;   // or nullptr
  const double* clip;       // or nullptr
  bool bias_correction;

  explicit StepState(const DeviceStep& d)
      : lr(d.lr.as<const double>()),
        step(d.step.as<const std::int32_t>()),
        loss_scale(d.loss_scale.as<const float>()),
        found_inf(d.found_inf.as<const float>()),
        clip(d.clip.as<const double>()),
        bias_correction(d.bias_correction) {}

  CAIRN_HOST_DEVICE bool skipped() const { return found_inf != nullptr && *found_inf != 0.0f; }
  CAIRN_HOST_DEVICE double gradient_scale(double scale) const {
    if (loss_scale != nullptr) scale /= static_cast<double>(*loss_scale);
    return clip != nullptr ? scale * *clip : scale;
  }
  CAIRN_HOST_DEVICE double correction(double beta) const {
    return bias_correction ? correction_of(beta, *step) : 1.0;
  }
};

/// The options with what `state` says now, as the host would have worked them out.
template <class Options>
CAIRN_HOST_DEVICE Options followed(Options options, const StepState& state) {
  options.lr = *state.lr;
  options.gradient_scale = state.gradient_scale(options.gradient_scale);
  if constexpr (requires { options.beta2; }) {
    options.correction1 = state.correction(options.beta1);
    options.correction2 = state.correction(options.beta2);
  }
  if constexpr (requires { options.first_step; }) options.first_step = *state.step == 1;
  if constexpr (requires { options.lr_decay; }) {
    options.lr /= 1.0 + static_cast<double>(*state.step - 1) * options.lr_decay;
  }
  return options;
}

}  // namespace cairn::kernels
