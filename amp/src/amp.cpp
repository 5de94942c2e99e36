#include "cairn/amp/amp.h"

#include <algorithm>
#include <cmath>

#include "amp_impl.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"

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
  autograd::backward(loss_);
}

ScaledLoss Amp::Impl::scale_loss(const Tensor& tensor, const LossOptions& which) {
  CAIRN_CHECK(
      tensor.defined() && tensor.numel() == 1 && core::is_floating(tensor.dtype()), "scale_loss",
      "expected a loss of one floating element, got ",
      tensor.defined() ? core::str(tensor.shape(), " ", tensor.dtype()) : "an undefined tensor");
  CAIRN_CHECK(!released, "scale_loss",
              "expected a handle whose models are initialized, got a released one");
  CAIRN_CHECK(std::isfinite(which.weight), "scale_loss", "expected a finite weight, got ",
              which.weight);
  const LossScaler& scaler = loss(which.loss_id, "scale_loss").scaler;
  std::vector<std::size_t> reached;
  for (const optim::Optimizer* optimizer : which.optimizers) {
    reached.push_back(segments.index_of(*optimizer, "scale_loss"));
  }
  std::sort(reached.begin(), reached.end());
  if (which.optimizers.empty()) reached = every_optimizer();
  Segment& segment = segments.begin(which.loss_id, scaler.scale(), reached);
  segment.unscale_delayed = which.delay_unscale;
  segment.check_delayed = which.delay_overflow_check;

  // Outside of any autocast region of the caller: half would overflow at 65504.
  const autograd::AutocastGuard no_autocast(false);
  const bool as_it_is = tensor.dtype() == DType::f32 || !options.enabled;
  const Tensor exact = as_it_is ? tensor : autograd::to(tensor, DType::f32);
  const double factor = segment.scale * which.weight;
  return ScaledLoss(factor == 1.0 ? exact : autograd::affine(exact, factor, 0.0));
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
  return impl_->loss(loss_id, "scaler").scaler;
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

void Amp::release() {
  Impl& impl = *impl_;
  if (std::exchange(impl.released, true) || !impl.options.enabled) return;
  for (nn::Module* model : impl.models) amp::release(*model);
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
