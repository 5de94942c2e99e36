#include "fallback.h"

#include <algorithm>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/kernels/multi_tensor.h"
#include "cast_model.h"

namespace cairn::amp {

struct Fallback::Layer {
  std::string name;
  nn::Module* module;
  NamedTensors parameters;  // its own, with the names they have in the model
  std::size_t wrapper = 0;
  bool f32 = false;
  int overflows = 0;  // in a row, of one loss
  int loss_id = 0;    // this one
};

struct Fallback::Watch {
  bool armed = false;  // look at outputs
  std::string culprit;
};

namespace {

bool is_finite(const Tensor& x) {
  if (!x.defined() || !core::is_floating(x.dtype()) || x.dtype() == DType::f64) return true;
  const Tensor dense = x.view().is_dense() ? x : autograd::contiguous(x.detach());
  return kernels::check_tensors({dense}).read().front().nonfinite == 0;
}

/// The dtype that a layer's input gets: its weights'. Batch norm takes half input with f32 weights.
Tensor input_for(const NamedTensors& parameters, bool batch_norm, const Tensor& x) {
  return batch_norm ? x : to_floating(x, parameters.front().tensor.dtype());
}

}  // namespace

Fallback::Fallback(const std::vector<nn::Module*>& models, const Options& options)
    : after_(options.fallback_after), watch_(std::make_shared<Watch>()) {
  const bool casts_model = core::is_half(options.cast_model_type.value_or(DType::f32));
  if (after_ == 0 || !(casts_model || options.autocast.value_or(false))) return;
  for (std::size_t m = 0; m < models.size(); ++m) {
    for (const auto& [path, module] : models[m]->modules()) {
      auto layer = std::make_shared<Layer>();
      layer->name = models.size() > 1 ? core::str(m, "/", path) : path;
      layer->module = module;
      for (const auto& [name, tensor] : module->parameters()) {
        const bool own = name.find('.') == std::string::npos;
        if (own) layer->parameters.push_back({path.empty() ? name : path + "." + name, tensor});
      }
      if (layer->parameters.empty()) continue;
      layer->wrapper = module->add_forward_wrapper(
          [layer, watch = watch_, casts_model](const Tensor& x, const nn::Module::Forward& next) {
            Tensor y;
            if (layer->f32) {
              const autograd::AutocastGuard no_autocast(false);
              y = next(to_floating(x, DType::f32));
            } else if (casts_model) {
              y = next(input_for(layer->parameters, layer->module->is_batch_norm(), x));
            } else {
              y = next(x);
            }
            if (watch->armed && watch->culprit.empty() && !is_finite(y)) {
              watch->culprit = layer->name;
            }
            return y;
          },
          "amp fallback");
      layers_.push_back(std::move(layer));
    }
  }
}

std::string Fallback::culprit() const {
  return watch_->culprit;
}

std::shared_ptr<Fallback::Layer> Fallback::owner_of(const std::string& parameter) const {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const auto owns = [&](const NamedTensor& p) { return p.name == parameter; };
    if (!std::any_of(layers_[i]->parameters.begin(), layers_[i]->parameters.end(), owns)) continue;
    // The gradient comes from the layer behind: where this one is f32 already, it is that one's.
    while (i + 1 < layers_.size() && layers_[i]->f32) ++i;
    return layers_[i];
  }
  return nullptr;
}

std::string Fallback::overflowed(int loss_id, const std::string& name,
                                 const std::vector<Culprit>& culprits, bool scale_at_minimum) {
  if (layers_.empty()) return {};
  overflowing_.insert(loss_id);
  watch_->armed = true;
  watch_->culprit.clear();
  std::shared_ptr<Layer> culprit;
  for (const auto& layer : layers_) {
    if (!name.empty() && layer->name == name) culprit = layer;
  }
  if (!culprit && scale_at_minimum && !culprits.empty()) {
    const int rank = culprits.front().rank;
    const auto last = std::find_if(culprits.rbegin(), culprits.rend(),
                                   [&](const Culprit& c) { return c.rank == rank; });
    culprit = owner_of(last->parameter);
  }
  for (const auto& layer : layers_) {
    if (layer != culprit && layer->loss_id == loss_id) layer->overflows = 0;
  }
  if (culprit) {
    culprit->overflows = culprit->loss_id == loss_id ? culprit->overflows + 1 : 1;
    culprit->loss_id = loss_id;
  }
  const bool falls = culprit && !culprit->f32 && culprit->overflows >= after_;
  return falls ? culprit->name : std::string();
}

void Fallback::stepped(int loss_id) {
  overflowing_.erase(loss_id);
  if (overflowing_.empty()) *watch_ = {};
  for (const auto& layer : layers_) {
    if (layer->loss_id == loss_id) layer->overflows = 0;
  }
}

bool Fallback::has(const std::string& name) const {
  return std::any_of(layers_.begin(), layers_.end(),
                     [&](const auto& layer) { return layer->name == name; });
}

void Fallback::fall_back(const std::string& name) {
  for (const auto& layer : layers_) {
    if (layer->name != name) continue;
    layer->f32 = true;
    layer->overflows = 0;
    for (const NamedTensor& parameter : layer->parameters) widen_parameter(parameter.tensor);
  }
}

std::vector<std::string> Fallback::layers() const {
  std::vector<std::string> names;
  for (const auto& layer : layers_) {
    if (layer->f32) names.push_back(layer->name);
  }
  return names;
}

void Fallback::release() {
  for (const auto& layer : layers_) layer->module->remove_forward_wrapper(layer->wrapper);
  layers_.clear();
}

}  // namespace cairn::amp
