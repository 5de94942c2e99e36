#include "cairn/amp/amp.h"

#include <algorithm>
#include <cmath>

#include "amp_impl.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::amp {

namespace {

/// From the norms of the parts; NaN where one of them is.
double norm_of_all(const std::vector<double>& norms, double type) {
  if (norms.size() == 1) return norms.front();
  double sum = 0.0;
  for (const double norm : norms) {
    if (std::isnan(norm)) return norm;
    sum = std::isinf(type) ? std::max(sum, norm) : sum + std::pow(norm, type);
  }
  return std::isinf(type) ? sum : std::pow(sum, 1.0 / type);
}

/// Ranks that reduce what the loss reaches must not wait for one that cannot begin its backward.
void tell_reducer(const optim::Optimizer& optimizer, const std::string& why) {
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const NamedTensor& parameter : group.parameters) {
      const core::GradientSlot* slot = parameter.tensor.gradient_slot_or_null();
      if (const auto reducer = slot == nullptr ? nullptr : slot->reducer())
        return reducer->backward_failed(why);
    }
  }
}

}  // namespace

Amp::Impl::Impl(Options resolved, const std::vector<nn::Module*>& model_list,
                const std::vector<optim::Optimizer*>& optimizers)
    : options(std::move(resolved)),
      losses(static_cast<std::size_t>(options.num_losses), Loss{LossScaler(options.scaler)}),
      contributions(optimizers),
      fallback(model_list, options),
      models(model_list) {}

Amp::Impl::Loss& Amp::Impl::loss(int id, const char* where) {
  CAIRN_CHECK(id >= 0 && id < options.num_losses, where, "expected a loss_id from 0 to ",
              options.num_losses - 1, ", got ", id, " (amp::Options::num_losses)");
  return losses[static_cast<std::size_t>(id)];
}

std::vector<std::size_t> Amp::Impl::optimizers_of(const LossOptions& which, const char* where) {
  CAIRN_CHECK(!released, where,
              "expected a handle whose models are initialized, got a released one");
  loss(which.loss_id, where);
  const bool all = which.optimizers.empty();
  std::vector<std::size_t> chosen;
  for (const optim::Optimizer* optimizer : all ? contributions.optimizers() : which.optimizers)
    chosen.push_back(contributions.index_of(*optimizer, where));
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

core::GradientScale Amp::Impl::scale_of(const LossOptions& which, double scale,
                                        const std::vector<std::size_t>& optimizers) {
  const LossContributionPtr one = contributions.open(which.loss_id, scale, optimizers);
  one->unscale_delayed = which.delay_unscale;
  one->check_delayed = which.delay_overflow_check;
  return {scaler_id(), scale, one};
}

Tensor Amp::Impl::scaled(const Tensor& tensor, double factor) {
  // Outside of any autocast region of the caller: half would overflow at 65504.
  const autograd::AutocastGuard no_autocast(false);
  const bool as_it_is = tensor.dtype() == DType::f32 || !options.enabled;
  const Tensor exact = as_it_is ? tensor : autograd::to(tensor, DType::f32);
  const Tensor weighted = factor == 1.0 ? exact : autograd::affine(exact, factor, 0.0);
  const Tensor on_device = device_scale();
  return on_device.defined() ? autograd::mul(weighted, on_device) : weighted;
}

void Amp::Impl::backward(const Tensor& scaled, double scale, const LossOptions& which) {
  const std::vector<std::size_t> optimizers = optimizers_of(which, "backward");
  // Refuses gradients of another scaler in any of them, reached or not: on all ranks alike.
  for (const std::size_t index : optimizers) {
    const optim::OptimizerAccess optimizer(contributions[index]);
    try {
      optimizer.check_scaler(scaler_id());
      optimizer.prepare();
    } catch (const core::Error& error) {
      tell_reducer(contributions[index], error.what());
      throw;
    }
  }
  autograd::backward(
      scaled, {},
      {.retain_graph = which.retain_graph, .scale = scale_of(which, scale, optimizers)});
}

ScaledLoss Amp::scale_loss(const Tensor& tensor, const LossOptions& which) const {
  CAIRN_CHECK(
      tensor.defined() && tensor.numel() == 1 && core::is_floating(tensor.dtype()), "scale_loss",
      "expected a loss of one floating element, got ",
      tensor.defined() ? core::str(tensor.shape(), " ", tensor.dtype()) : "an undefined tensor");
  CAIRN_CHECK(std::isfinite(which.weight), "scale_loss", "expected a finite weight, got ",
              which.weight);
  impl_->optimizers_of(which, "scale_loss");
  const bool on_host = !impl_->device_scale().defined();
  const double scale = on_host ? impl_->loss(which.loss_id, "scale_loss").scaler.scale() : 1.0;
  return {
      impl_->scaled(tensor, scale * which.weight),
      [impl = impl_, scale, which](const Tensor& scaled) { impl->backward(scaled, scale, which); }};
}

Region::Region(const Options& options, bool autocast) {
  if (!autocast) return;
  autocast_.emplace(true, options.half_dtype);
  policies_.emplace(options.cast_policies);
}

Region Amp::region() const {
  const bool autocast = impl_->options.autocast.value_or(false) || impl_->fallback.any()();
  return {impl_->options, autocast && !impl_->released};
}

Tensor Amp::cast(const Tensor& x) const {
  const std::optional<DType> dtype = impl_->options.cast_model_type;
  return dtype && !impl_->released ? to_floating(x, *dtype) : x;
}

void Amp::adopt_gradients(optim::Optimizer& optimizer, const LossOptions& options) const {
  LossOptions own = options;
  own.optimizers = {&optimizer};
  const std::size_t index = impl_->optimizers_of(own, "adopt_gradients").front();
  if (impl_->device) {
    core::fail<core::Unsupported>("adopt_gradients",
                                  "expected gradients that precision.backward() ",
                                  "scaled in a capturable step, got others");
  }
  for (const LossContributionPtr& held : impl_->contributions.held_by(index)) {
    CAIRN_CHECK(held->judged || held->loss_id == options.loss_id, "adopt_gradients",
                "expected gradients of loss ", options.loss_id, " alone, got those of loss ",
                held->loss_id, " in the same optimizer (step first)");
  }
  optim::OptimizerAccess(optimizer).prepare();
  const double scale = impl_->loss(options.loss_id, "adopt_gradients").scaler.scale();
  impl_->contributions.adopt(index, impl_->scale_of(own, scale, {index}));
}

void Amp::unscale(optim::Optimizer& optimizer) const {
  LossContributions& contributions = impl_->contributions;
  const std::size_t index = contributions.index_of(optimizer, "unscale");
  CAIRN_CHECK(!impl_->released, "unscale",
              "expected a handle whose models are initialized, got a released one");
  if (impl_->device) {
    core::fail<core::Unsupported>("unscale",
                                  "expected a handle that is not capturable, got one whose loss ",
                                  "scale lies on the device (set_capturable(false))");
  }
  const optim::SharedStep shared({&optimizer});
  const optim::OptimizerAccess access(optimizer);
  access.wait_for_reductions();
  access.check_scaler(impl_->scaler_id());
  contributions.adopt(index, {0, 1.0, contributions.open(0, 1.0, {index})});
  (void)optimizer.stash();
}

Tensor Amp::unscaled_gradient(const Tensor& parameter) const {
  const core::GradientSlot* slot = parameter.gradient_slot_or_null();
  if (slot == nullptr || !(slot->has_sum() || slot->holds_gradient())) return {};
  Tensor result =
      Tensor::empty_strided(parameter.shape(), parameter.strides(), DType::f32, parameter.device());
  const bool sum = slot->has_sum();
  kernels::affine(sum ? slot->sum() : slot->memory(), sum ? 1.0 : 1.0 / slot->scale().factor, 0.0,
                  result);
  if (sum && slot->holds_gradient()) {
    kernels::axpby(1.0 / slot->scale().factor, slot->memory(), 1.0, result);
  }
  if (const Tensor scale = impl_->device_scale(); scale.defined()) {
    kernels::binary(kernels::BinaryOp::div, result, scale, result);
  }
  return result;
}

optim::StepResult Amp::step(optim::Optimizer& optimizer, const optim::StepOptions& options) {
  return impl_->step({impl_->contributions.index_of(optimizer, "step")}, options).front();
}

optim::StepResult Amp::step(const optim::StepOptions& options) {
  std::vector<optim::StepResult> results = impl_->step(impl_->optimizers_of({}, "step"), options);
  if (results.empty()) return {};
  const auto had_none = [](const optim::StepResult& one) {
    return one.reason == optim::kNoGradient;
  };
  if (!std::all_of(results.begin(), results.end(), had_none)) std::erase_if(results, had_none);
  optim::StepResult all = results.front();
  std::vector<double> norms{all.gradient_norm};
  for (std::size_t i = 1; i < results.size(); ++i) {
    const optim::StepResult& one = results[i];
    all.applied = all.applied && one.applied;
    if (!one.reason.empty() && all.reason.find(one.reason) == std::string::npos) {
      all.reason += (all.reason.empty() ? "" : "; ") + one.reason;
    }
    if (all.culprit.empty()) all.culprit = one.culprit;
    norms.push_back(one.gradient_norm);
    all.clip_coefficient = std::min(all.clip_coefficient, one.clip_coefficient);
  }
  all.gradient_norm = norm_of_all(norms, options.norm_type);
  return all;
}

const Options& Amp::options() const {
  return impl_->options;
}

const LossScaler& Amp::scaler(int loss_id) const {
  return impl_->current_scaler(loss_id, "scaler");
}

double Amp::loss_scale(int loss_id) const {
  return scaler(loss_id).scale();
}

std::string Amp::describe() const {
  return amp::describe(impl_->options);
}

std::vector<Overflow> Amp::overflows() const {
  return {impl_->overflows.begin(), impl_->overflows.end()};
}

std::vector<std::string> Amp::fp32_layers() const {
  return impl_->fallback.layers();
}

bool Amp::capturable() const {
  return impl_->device.has_value();
}

void Amp::release() {
  Impl& impl = *impl_;
  if (impl.released) return;
  for (const nn::Module* model : impl.models) {
    CAIRN_CHECK(
        !was_moved(*model), "release",
        "expected the models that amp::initialize was given where they were, got one that was ",
        "moved since (amp::release(model) gives back the one that it was moved to)");
    check_masters_whole(model->parameters(), "release");
  }
  set_capturable(false);
  impl.released = true;
  if (!impl.options.enabled) return;
  for (nn::Module* model : impl.models) {
    amp::release(*model);
    model->clear_grad();  // scaled, whoever steps them
  }
  impl.contributions.reset();
  impl.refresh_optimizers();
}

void release(nn::Module& model) {
  check_masters_whole(model.parameters(), "release");
  release_layers(model);
  release_model(model);
}

}  // namespace cairn::amp
