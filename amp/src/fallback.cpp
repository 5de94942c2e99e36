#include "fallback.h"

#include <algorithm>
#include <mutex>
#include <optional>

#include "cairn/autograd/autocast.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/kernels/multi_tensor.h"
#include "cast_model.h"

namespace cairn::amp {

struct Fallback::Layer {
  std::string name;
  NamedTensors parameters;  // its own, with the names they have in the model
  bool f32 = false;
};

namespace {

constexpr const char* kFallbackWrapper = "amp fallback";

bool is_finite(const Tensor& x) {
  if (!x.defined() || !core::is_floating(x.dtype()) || x.dtype() == DType::f64) return true;
  const Tensor dense = x.view().is_dense() ? x : autograd::contiguous(x.detach());
  return kernels::check_tensors({dense}).read().front().nonfinite == 0;
}

using Policies = std::vector<std::pair<std::string, autograd::CastPolicy>>;

/// Every operation that is half by itself.
std::shared_ptr<const Policies> all_in_f32() {
  auto policies = std::make_shared<Policies>();
  for (const autograd::Operation& operation : autograd::operations()) {
    if (operation.policy != autograd::CastPolicy::half) continue;
    policies->emplace_back(operation.name, autograd::CastPolicy::f32);
  }
  return policies;
}

}  // namespace

struct Fallback::Watch {
  /// The first output that is not finite tells the layer.
  void look(const Tensor& y, const std::string& layer) {
    const std::lock_guard lock(mutex);
    if (culprit.empty() && !is_finite(y)) culprit = layer;
  }

  bool any = false;    // layer fell back
  bool armed = false;  // look at outputs
  std::mutex mutex;    // replicas of the model run in several threads
  std::string culprit;
};

Fallback::Fallback(const std::vector<nn::Module*>& models, const Options& options)
    : after_(options.fallback_after), watch_(std::make_shared<Watch>()) {
  const bool casts_model = core::is_half(options.cast_model_type.value_or(DType::f32));
  if (after_ == 0 || !(casts_model || options.autocast.value_or(false))) return;
  const std::shared_ptr<const Policies> in_f32 = all_in_f32();
  for (std::size_t m = 0; m < models.size(); ++m) {
    for (const auto& [path, module] : models[m]->modules()) {
      auto layer = std::make_shared<Layer>();
      layer->name = models.size() > 1 ? core::str(m, "/", path) : path;
      if (layer->name.empty()) layer->name = module->kind();  // the model is one layer
      for (const auto& [name, tensor] : module->parameters()) {
        if (name.find('.') != std::string::npos) continue;  // of a module below
        layer->parameters.push_back({path.empty() ? name : core::str(path, ".", name), tensor});
      }
      if (layer->parameters.empty()) continue;
      module->add_forward_wrapper(
          [layer, watch = watch_, in_f32](const Tensor& x, const nn::Module::Forward& next) {
            std::optional<autograd::CastPolicyGuard> policies;
            if (layer->f32) policies.emplace(*in_f32);
            Tensor y = next(layer->f32 ? to_floating(x, DType::f32) : x);
            if (watch->armed) watch->look(y, layer->name);
            return y;
          },
          kFallbackWrapper);
      layers_.push_back(std::move(layer));
    }
  }
}

std::string Fallback::culprit() const {
  return watch_->culprit;
}

std::shared_ptr<Fallback::Layer> Fallback::named(const std::string& name) const {
  const auto found = std::find_if(layers_.begin(), layers_.end(),
                                  [&](const auto& layer) { return layer->name == name; });
  return found == layers_.end() ? nullptr : *found;
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
  watch_->armed = true;
  watch_->culprit.clear();
  std::shared_ptr<Layer> culprit = named(name);
  if (!culprit && scale_at_minimum && !culprits.empty()) {
    const int rank = culprits.front().rank;
    const auto last = std::find_if(culprits.rbegin(), culprits.rend(),
                                   [&](const Culprit& c) { return c.rank == rank; });
    culprit = owner_of(last->parameter);
  }
  Row& row = rows_[loss_id];
  row = {culprit, row.culprit == culprit ? row.overflows + 1 : 1};
  const bool falls = culprit && !culprit->f32 && row.overflows >= after_;
  return falls && fall_back(culprit->name) ? culprit->name : std::string();
}

void Fallback::stepped(int loss_id) {
  rows_.erase(loss_id);
  watch_->armed = !rows_.empty();
  watch_->culprit.clear();
}

void Fallback::reset() {
  rows_.clear();
  watch_->armed = false;
  watch_->culprit.clear();
}

bool Fallback::fall_back(const std::string& name) {
  const std::shared_ptr<Layer> layer = named(name);
  if (!layer) return false;
  check_masters_whole(layer->parameters, "fallback_after");
  layer->f32 = watch_->any = true;
  for (const NamedTensor& parameter : layer->parameters) widen_parameter(parameter.tensor);
  return true;
}

std::vector<std::string> Fallback::layers() const {
  std::vector<std::string> names;
  for (const auto& layer : layers_) {
    if (layer->f32) names.push_back(layer->name);
  }
  return names;
}

std::function<bool()> Fallback::any() const {
  return [watch = watch_] { return watch->any; };
}

void release_layers(nn::Module& model) {
  for (const auto& [name, module] : model.modules())
    module->remove_forward_wrappers(kFallbackWrapper);
}

}  // namespace cairn::amp
