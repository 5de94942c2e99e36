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

Amp::Impl::Impl(Options resolved, const std::vector<nn::Module*>& model_list,
                const std::vector<optim::Optimizer*>& optimizers)
    : options(std::move(resolved)),
      losses(static_cast<std::size_t>(options.num_losses), Loss{LossScaler(options.scaler)}),
      segments(optimizers),
      fallback(model_list, options),
      models(model_list) {
  if (!options.enabled) return;
  const MasterStorages storages = master_storages(optimizers);
  for (nn::Module* model : models) cast_model(*model, options, storages, fallback.any());
}

Amp::Impl::Loss& Amp::Impl::loss(int id, const char* where) {
  CAIRN_CHECK(id >= 0 && id < options.num_losses, where, "expected a loss_id from 0 to ",
              options.num_losses - 1, ", got ", id, " (amp::Options::num_losses)");
  return losses[static_cast<std::size_t>(id)];
}

std::vector<std::size_t> Amp::Impl::every_optimizer() const {
  std::vector<std::size_t> all(segments.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  return all;
}

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

}  // namespace

void ScaledLoss::backward() const {
  autograd::backward(loss_, {}, {.retain_graph = retain_graph_, .scale = scale_});
}

namespace {

/// Ranks that reduce what the loss reaches must not wait for one that cannot begin its backward.
void refuse(const optim::Optimizer& optimizer, const std::string& why) {
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const NamedTensor& parameter : group.parameters) {
      const core::GradientSlot* slot = parameter.tensor.gradient_slot_or_null();
      if (const auto reducer = slot == nullptr ? nullptr : slot->reducer())
        return reducer->backward_failed(why);
    }
  }
}

}  // namespace

Segment& Amp::Impl::begin_segment(const LossOptions& which, const char* where) {
  CAIRN_CHECK(!released, where,
              "expected a handle whose models are initialized, got a released one");
  const LossScaler& scaler = loss(which.loss_id, where).scaler;
  std::vector<std::size_t> reached;
  for (const optim::Optimizer* optimizer : which.optimizers) {
    reached.push_back(segments.index_of(*optimizer, where));
  }
  std::sort(reached.begin(), reached.end());
  if (which.optimizers.empty()) reached = every_optimizer();
  const optim::Optimizer* looked_at = nullptr;
  const double scale =
      device && scaler.dynamic() ? 1.0 : scaler.scale();  // else known to the device
  Segment* begun = nullptr;
  try {
    for (const std::size_t index : reached) {
      looked_at = segments.optimizers()[index].optimizer;
      looked_at->check_scaler(scaler_id());
    }
    begun = &segments.begin(which.loss_id, scale, reached);
  } catch (const core::Error& error) {
    if (looked_at != nullptr) refuse(*looked_at, error.what());
    throw;
  }
  Segment& segment = *begun;
  segment.unscale_delayed = which.delay_unscale;
  segment.check_delayed = which.delay_overflow_check;
  return segment;
}

ScaledLoss Amp::Impl::scale_loss(const Tensor& tensor, const LossOptions& which) {
  CAIRN_CHECK(
      tensor.defined() && tensor.numel() == 1 && core::is_floating(tensor.dtype()), "scale_loss",
      "expected a loss of one floating element, got ",
      tensor.defined() ? core::str(tensor.shape(), " ", tensor.dtype()) : "an undefined tensor");
  CAIRN_CHECK(std::isfinite(which.weight), "scale_loss", "expected a finite weight, got ",
              which.weight);
  const Segment& segment = begin_segment(which, "scale_loss");

  // Outside of any autocast region of the caller: half would overflow at 65504.
  const autograd::AutocastGuard no_autocast(false);
  const bool as_it_is = tensor.dtype() == DType::f32 || !options.enabled;
  const Tensor exact = as_it_is ? tensor : autograd::to(tensor, DType::f32);
  const double factor = segment.scale * which.weight;
  const Tensor weighted = factor == 1.0 ? exact : autograd::affine(exact, factor, 0.0);
  const bool on_device = device && losses.front().scaler.dynamic();
  return {on_device ? autograd::mul(weighted, device->scale()) : weighted,
          {scaler_id(), segment.scale},
          which.retain_graph};
}

Region::Region(const Options& options, bool autocast) {
  if (!autocast) return;
  autocast_.emplace(true, options.half_dtype);
  policies_.emplace(options.cast_policies);
}

Region Amp::region() const {
  const auto fell_back = impl_->fallback.any();
  const bool autocast = impl_->options.autocast.value_or(false) || (fell_back && fell_back());
  return {impl_->options, autocast && impl_->options.enabled && !impl_->released};
}

Tensor Amp::cast(const Tensor& x) const {
  const bool casts = impl_->options.enabled && !impl_->released && impl_->options.cast_model_type;
  return casts ? to_floating(x, *impl_->options.cast_model_type) : x;
}

void Amp::adopt_gradients(optim::Optimizer& optimizer, const LossOptions& options) const {
  const std::size_t index = impl_->segments.index_of(optimizer, "adopt_gradients");
  const SegmentPtr& open = impl_->segments.optimizers()[index].open;
  CAIRN_CHECK(!open || open->loss_id == options.loss_id, "adopt_gradients",
              "expected gradients of loss ", options.loss_id, " alone, got those of loss ",
              open->loss_id, " in the same optimizer (step first)");
  if (impl_->device) {
    core::fail<core::Unsupported>("adopt_gradients",
                                  "expected gradients that precision.backward() ",
                                  "scaled in a capturable step, got others");
  }
  const double scale = impl_->loss(options.loss_id, "adopt_gradients").scaler.scale();
  optimizer.mark_scaled({impl_->scaler_id(), scale});
  LossOptions own = options;
  own.optimizers = {&optimizer};
  impl_->begin_segment(own, "adopt_gradients");
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
  if (impl_->device && impl_->losses.front().scaler.dynamic()) {
    kernels::binary(kernels::BinaryOp::div, result, impl_->device->scale(), result);
  }
  return result;
}

ScaledLoss Amp::scale_loss(const Tensor& loss, const LossOptions& options) const {
  return impl_->scale_loss(loss, options);
}

optim::StepResult Amp::step(optim::Optimizer& optimizer, const optim::StepOptions& options) {
  return impl_->step({impl_->segments.index_of(optimizer, "step")}, options).front();
}

optim::StepResult Amp::step(const optim::StepOptions& options) {
  const auto results = impl_->step(impl_->every_optimizer(), options);
  if (results.empty()) return {};
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

void Amp::set_capturable(bool value) {
  impl_->set_capturable(value);
}

bool Amp::capturable() const {
  return impl_->device.has_value();
}

optim::StepResult Amp::report() {
  return impl_->report();
}

void Amp::release() {
  set_capturable(false);
  Impl& impl = *impl_;
  if (std::exchange(impl.released, true) || !impl.options.enabled) return;
  for (nn::Module* model : impl.models) {
    amp::release(*model);
    model->clear_grad();  // scaled, whoever steps them
  }
  for (const GradientSegments::Optimizer& entry : impl.segments.optimizers()) {
    entry.optimizer->clear_grad();  // they are scaled
  }
  impl.refresh_optimizers();
}

void release(nn::Module& model) {
  release_layers(model);
  release_model(model);
}

}  // namespace cairn::amp
