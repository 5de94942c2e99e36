#include "cairn/amp/scaled_step.h"

#include <string>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer_access.h"
#include "overflow_agreement.h"

namespace cairn::amp {

namespace {

// A load of the optimizer's state drops gradients; the trainer has written its own since.
void mark_wrapped_gradients_written(const optim::Optimizer& optimizer) {
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const auto& [name, tensor] : group.parameters) {
      core::GradientSlot& slot = tensor.gradient_slot();
      if (slot.placed() && !slot.owner()) slot.mark_written();
    }
  }
}

}  // namespace

ScaledStep::ScaledStep(optim::Optimizer& optimizer, const LossScalerOptions& options, World world)
    : optimizer_(&optimizer), scaler_(options), world_(std::move(world)) {}

optim::StepResult ScaledStep::step(optim::StepOptions options) {
  CAIRN_CHECK(options.check, "step", "expected check = true, got false (the scale follows what ",
              "the check finds; optimizer.step() takes gradients as they come)");
  const optim::OptimizerAccess optimizer(*optimizer_);
  optimizer.check_not_moved();
  ++steps_;
  mark_wrapped_gradients_written(*optimizer_);
  const double scale = scaler_.scale();
  options.gradient_scale /= scale;
  optimizer.wait_for_reductions();
  optim::GradientReport report;
  bool any = false;
  const auto find = [&] {
    optimizer.check_scaler(0);
    optimizer.prepare_gradients();
    report = optimizer.begin_own_check(options.norm_type).read();
    any = optimizer.has_gradient();
    StepReport own;
    own.losses_ended = any ? core::str("a loss scaled by ", scale) : std::string("none");
    for (const optim::NonFinite& n : report.nonfinite) {
      own.overflows[0].push_back({n.parameter, world_.rank, n.inf, n.nan});
    }
    return own;
  };
  const StepReport all = agree(find, world_);
  const bool overflow = !all.overflows.empty();
  optim::StepResult result = overflow
                                 ? optimizer_->skip(report, options)
                                 : optimizer.end_update(optimizer.begin_update(report, options));
  const bool at_minimum = scaler_.at_minimum();
  if (any) scaler_.update(overflow);
  if (!overflow) return result;
  last_overflow_ = Overflow{steps_, 0, scale, all.overflows.at(0)};
  result.reason =
      core::str(last_overflow_->describe(world_.size), "; ", scale_change(scale, scaler_));
  std::vector<std::string> names = parameters_of(last_overflow_->culprits);
  if (!names.empty()) result.culprit = names.front();
  if (at_minimum) optimizer.note_skip(result.reason, std::move(names), options.collapse_after);
  return result;
}

}  // namespace cairn::amp
