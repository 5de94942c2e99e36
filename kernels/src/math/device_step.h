// What an update reads of a DeviceStep, where it lies: kernels and the CPU backend share it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

struct StepState {
  const float* lr;
  std::int32_t* step;
  const float* loss_scale;  // or nullptr
  const float* found_inf;   // or nullptr
  bool bias_correction;

  explicit StepState(const DeviceStep& d)
      : lr(d.lr.as<const float>()),
        step(d.step.as<std::int32_t>()),
        loss_scale(d.loss_scale.as<const float>()),
        found_inf(d.found_inf.as<const float>()),
        bias_correction(d.bias_correction) {}

  CAIRN_HOST_DEVICE bool skipped() const { return found_inf != nullptr && *found_inf != 0.0f; }
  CAIRN_HOST_DEVICE float scale() const { return loss_scale != nullptr ? *loss_scale : 1.0f; }
};

/// The numbers of AdamOptions, for math::Adam.
struct AdamNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw;
  double correction1, correction2;

  explicit AdamNumbers(const AdamOptions& o)
      : lr(o.lr),
        beta1(o.beta1),
        beta2(o.beta2),
        eps(o.eps),
        weight_decay(o.weight_decay),
        adamw(o.adamw),
        correction1(o.correction1),
        correction2(o.correction2) {}

  /// Takes what `state` says now.
  CAIRN_HOST_DEVICE void follow(const StepState& state) {
    lr = static_cast<double>(*state.lr);
    if (!state.bias_correction) return;
    correction1 = 1.0 - ::pow(beta1, static_cast<double>(*state.step));
    correction2 = 1.0 - ::pow(beta2, static_cast<double>(*state.step));
  }
};

}  // namespace cairn::kernels
