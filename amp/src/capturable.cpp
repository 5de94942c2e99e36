// Steps that take no host.
#include "amp_impl.h"
#include "cairn/core/error.h"

namespace cairn::amp {

using core::fail;
using core::Unsupported;

namespace {

/// "inf or NaN in the gradient of conv1.weight, and 4 more parameters".
std::string nonfinite_in(const std::vector<std::string>& parameters) {
  if (parameters.empty()) return "gradients that are not finite";
  const std::size_t others = parameters.size() - 1;
  std::string text = "inf or NaN in the gradient of " + parameters.front();
  if (others > 0) text += core::str(", and ", others, " more parameter", others == 1 ? "" : "s");
  return text;
}

void check_capturable(const Options& options, std::size_t optimizers) {
  const auto refuse = [](const auto&... what) {
    fail<Unsupported>("amp", "expected what a capturable step can do, got ", what...,
                      " (set_capturable(false))");
  };
  if (options.num_losses != 1) refuse(options.num_losses, " losses with scales of their own");
  if (optimizers != 1) refuse(optimizers, " optimizers");
  if (options.world.size > 1 && !options.world.reduces_gradients())
    refuse(options.world.size,
           " ranks whose backwards do not average gradients (.world = ddp.world())");
  if (options.fallback_after > 0) refuse("fallback_after, which looks at each layer's output");
}

}  // namespace

void Amp::set_capturable(bool value) {
  Impl& impl = *impl_;
  if (value == capturable()) return;
  if (!value) {
    impl.current_scaler(0, "amp");
    impl.only_optimizer().set_capturable(false);
    impl.device.reset();
    return;
  }
  check_capturable(impl.options, impl.contributions.size());
  optim::Optimizer& optimizer = impl.only_optimizer();
  const optim::OptimizerAccess access(optimizer);
  CAIRN_CHECK(!access.has_gradient(), "amp",
              "expected to become capturable between two steps, got gradients of a backward");
  optimizer.set_capturable(true);
  impl.device.emplace(impl.losses.front().scaler, access.found_inf().device);
  impl.write_scaler();
}

void Amp::Impl::write_scaler() {
  if (!device) return;
  device->write(losses.front().scaler);
  reported_overflows = 0;
  reported_steps = steps;
}

LossScaler& Amp::Impl::current_scaler(int id, const char* where) {
  LossScaler& scaler = loss(id, where).scaler;
  if (device) device->read(scaler);
  return scaler;
}

std::vector<optim::StepResult> Amp::Impl::step_on_device(const std::vector<std::size_t>& which,
                                                         optim::StepOptions step_options) {
  check_losses(which);
  const HeldContributions held = contributions.held_by(0);
  if (!held.empty() && (*held.rbegin())->check_delayed) {
    fail<Unsupported>("step",
                      "expected backwards without delay_overflow_check in a capturable step, "
                      "got one with it");
  }
  ++steps;
  const optim::OptimizerAccess optimizer(only_optimizer());
  if (!held.empty()) step_options.gradient_scale /= (*held.rbegin())->scale;
  contributions.end(which);
  const Tensor scale = device_scale();
  const optim::StepResult result = optimizer.step_on_device(
      step_options, scaler_id(), scale.defined() ? scale.view() : TensorView());
  if (result.applied && step_options.check) device->update(optimizer.found_inf());
  return {result};
}

optim::StepResult Amp::report() {
  CAIRN_CHECK(capturable(), "report",
              "expected a capturable handle, got another (step() itself reports)");
  Impl& impl = *impl_;
  const DeviceScaler::Overflows counted = impl.device->overflows();
  const std::int64_t skipped = counted.all - std::exchange(impl.reported_overflows, counted.all);
  const std::int64_t taken = impl.steps - std::exchange(impl.reported_steps, impl.steps);
  const std::vector<std::string> parameters =
      optim::OptimizerAccess(impl.only_optimizer()).take_overflowed();
  optim::StepResult result;
  result.applied = skipped == 0;
  if (skipped == 0) return result;
  result.culprit = parameters.empty() ? "" : parameters.front();
  result.reason =
      core::str(skipped, " of ", taken, taken == 1 ? " step" : " steps",
                " skipped: ", nonfinite_in(parameters), "; loss scale ", number(loss_scale()));
  impl.losses.front().collapsing.set(static_cast<int>(counted.at_minimum), parameters);
  impl.throw_if_collapsed();
  return result;
}

}  // namespace cairn::amp
