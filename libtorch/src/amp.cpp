#include "cairn/libtorch/amp.h"

#include <utility>

#include "backward.h"
#include "cairn/core/error.h"
#include "model_impl.h"

namespace cairn::libtorch {

namespace {

void check_options(const amp::Options& options) {
  CAIRN_CHECK(options.cast_policies.empty(), "initialize",
              "expected no cast_policies for libtorch's autocast, got one of '",
              options.cast_policies.front().first, "' (open an AutocastGuard in the forward)");
  CAIRN_CHECK(options.fallback_after == 0, "initialize",
              "expected fallback_after 0 for a libtorch model, got ", options.fallback_after);
}

}  // namespace

Amp::Amp(amp::Amp handle, std::vector<Model*> models)
    : amp::Amp(std::move(handle)), models_(std::move(models)) {}

void Amp::backward(const torch::Tensor& loss, const amp::LossOptions& options) const {
  const FollowedBackward followed(models_);
  amp::Amp::backward(loss_of(loss, models_, options.retain_graph), options);
}

void Amp::backward(const Tensor& loss, const amp::LossOptions& options) const {
  const FollowedBackward followed(models_);
  amp::Amp::backward(loss, options);
}

void Amp::release() {
  for (const Model* model : models_) model->impl().follow_changes();
  amp::Amp::release();
  for (const Model* model : models_) {
    model->impl().follow_cairn();
    model->impl().precision.reset();
  }
}

Amp initialize(const std::vector<Model*>& models, const std::vector<optim::Optimizer*>& optimizers,
               const amp::Options& options) {
  check_options(options);
  const bool keep_statistics = amp::resolve(options).keep_batchnorm_fp32.value_or(true);
  std::vector<nn::Module*> modules;
  for (Model* model : models) {
    CAIRN_CHECK(model != nullptr, "initialize", "expected a Model, got a null pointer");
    model->impl().follow_changes();
    model->impl().mirror.keep_statistics(keep_statistics);
    modules.push_back(&model->module());
  }
  const amp::Amp handle = amp::initialize(modules, optimizers, options);
  for (const Model* model : models) {
    model->impl().precision = handle.options();
    model->impl().follow_cairn();
  }
  return {handle, models};
}

Amp initialize(Model& model, optim::Optimizer& optimizer, const amp::Options& options) {
  return initialize({&model}, {&optimizer}, options);
}

}  // namespace cairn::libtorch
