// ScaledStep: loss scale, overflow check and update for a trainer with gradients of its own. Needs
// no graph: cairn::amp_scaling has it. (With cairn::nn, amp::Amp does this and more.)
//
//   amp::ScaledStep scaled(optimizer, {}, reducer.world());
//   // a backward of the loss times scaled.scale(), into the optimizer's gradients; then:
//   optim::StepResult r = scaled.step({.max_gradient_norm = 1.0});
//   if (!r.applied) log::warn("{}", r.reason);  // inf in the gradient of wte ...
#pragma once

#include <optional>

#include "cairn/amp/loss_scaler.h"
#include "cairn/amp/overflow.h"
#include "cairn/core/world.h"
#include "cairn/optim/optimizer.h"

namespace cairn::amp {

class ScaledStep : public core::Stateful {
 public:
  /// The optimizer must outlive it and stay where it is. `world`: the ranks over which the
  /// gradients are averaged (parallel::Reducer::world(), which also tells whose own gradients
  /// overflowed).
  explicit ScaledStep(optim::Optimizer& optimizer, const LossScalerOptions& options = {},
                      World world = {});

  /// What the next loss is multiplied by.
  double scale() const { return scaler_.scale(); }
  /// Checks the gradients and divides them by the scale in the update; or skips, on all ranks,
  /// where one rank's are not finite. Then updates the scale, and clears gradients as
  /// optimizer.step() does, whoever wrote them (autograd::backward(loss * scale), say). Wrapped
  /// gradients (optim::wrap_parameter) count as written before each step: the trainer writes them.
  /// Without any gradient nothing is applied and the scale stays. Skips at the least scale, or a
  /// static one, are warned of and end in GradientCollapse as optimizer.step()'s do; others belong
  /// to the search for the scale. A collective where there are several ranks: where one cannot
  /// check its gradients, all throw. Throws InvalidArgument for check = false, for gradients that
  /// amp scaled and where the optimizer was moved from.
  optim::StepResult step(optim::StepOptions options = {});
  /// The last one; none: no step has overflowed.
  const std::optional<Overflow>& last_overflow() const { return last_overflow_; }
  const LossScaler& scaler() const { return scaler_; }

  /// The scaler's.
  StateDict state_dict() const override { return scaler_.state_dict(); }
  void load_state_dict(const StateDict& state) override { scaler_.load_state_dict(state); }

 private:
  optim::Optimizer* optimizer_;
  LossScaler scaler_;
  World world_;
  std::int64_t steps_ = 0;
  std::optional<Overflow> last_overflow_;
};

}  // namespace cairn::amp
