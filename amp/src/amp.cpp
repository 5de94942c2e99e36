#include "cairn/amp/amp.h"

#include "amp_impl.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "number.h"

namespace cairn::amp {

namespace {

const char* scale_kind(const Options& options) {
  return options.dynamic_loss_scale ? "dynamic" : "static";
}

/// What became of the scale in a skipped step.
std::string scale_change(double before, const LossScaler& scaler) {
  if (!scaler.dynamic()) return "; loss scale stays " + number(before) + " (static)";
  if (scaler.scale() == before) return "; loss scale stays " + number(before) + " (its minimum)";
  return "; loss scale " + number(before) + " -> " + number(scaler.scale());
}

}  // namespace

void ScaledLoss::backward() const {
  autograd::backward(loss_);
}

ScaledLoss Amp::scale_loss(const Tensor& loss) const {
  CAIRN_CHECK(loss.defined() && loss.numel() == 1 && core::is_floating(loss.dtype()), "scale_loss",
              "expected a loss of one floating element, got ",
              loss.defined() ? core::str(loss.shape(), " ", loss.dtype()) : "an undefined tensor");
  // Outside of any autocast region of the caller: half would overflow at 65504.
  const autograd::AutocastGuard no_autocast(false);
  const Tensor exact = loss.dtype() == DType::f32 ? loss : autograd::to(loss, DType::f32);
  const double scale = impl_->scaler.scale();
  return ScaledLoss(scale == 1.0 ? exact : autograd::affine(exact, scale, 0.0));
}

optim::StepResult Amp::step() {
  const Options& options = impl_->options;
  const double scale = impl_->scaler.scale();
  optim::StepOptions step;
  step.gradient_scale = 1.0 / (scale * options.accumulation_steps);
  step.max_gradient_norm = options.max_gradient_norm;

  optim::Optimizer& optimizer = *impl_->optimizer;
  const optim::GradientReport report = optimizer.check();
  bool overflow = !report.finite();
  if (options.all_reduce_max) overflow = options.all_reduce_max(overflow ? 1.0 : 0.0) > 0.0;
  optim::StepResult result =
      overflow ? optimizer.skip(report, step) : optimizer.update(report, step);
  impl_->scaler.update(overflow);
  if (overflow) {
    if (report.finite()) result.reason = "a gradient of another rank is not finite";
    result.reason += scale_change(scale, impl_->scaler);
  }
  return result;
}

const Options& Amp::options() const {
  return impl_->options;
}

double Amp::loss_scale() const {
  return impl_->scaler.scale();
}

std::string Amp::describe() const {
  return amp::describe(impl_->options);
}

StateDict Amp::state_dict() const {
  const Options& options = impl_->options;
  StateDict state;
  state.set("opt_level", std::string(name(options.opt_level)));
  state.set("half_dtype", std::string(core::name(options.half_dtype)));
  state.set("loss_scale_kind", std::string(scale_kind(options)));
  state.set("loss_scaler0", impl_->scaler.state_dict());
  return state;
}

void Amp::load_state_dict(const StateDict& state) {
  const Options& options = impl_->options;
  const std::string& level = state.text("opt_level");
  const std::string& half = state.text("half_dtype");
  const std::string& kind = state.text("loss_scale_kind");
  LossScaler loaded = impl_->scaler;
  loaded.load_state_dict(state.dict("loss_scaler0"));  // throws where it is damaged
  if (level != name(options.opt_level) || half != core::name(options.half_dtype)) {
    log::info("amp: a state of {} {} continues at {} {}", level, half, name(options.opt_level),
              options.half_dtype);
  }
  if (options.dynamic_loss_scale && kind == "dynamic") {
    impl_->scaler = loaded;
  } else if (kind != scale_kind(options) || loaded.scale() != impl_->scaler.scale()) {
    log::info("amp: the loss scale stays {} ({}), the state has {} ({})",
              number(impl_->scaler.scale()), scale_kind(options), number(loaded.scale()), kind);
  }
}

}  // namespace cairn::amp
