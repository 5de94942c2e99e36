// Pass 1: what the gradients are, and gathering those of several backwards.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/gradients/stash.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"

namespace cairn::optim {

namespace {

/// Tensors of one device, and which parameters they are of.
struct List {
  Device device;
  std::vector<TensorView> views;
  std::vector<TensorView> weights;  // of LARC
  std::vector<std::size_t> parameters;
};

List& list_of(std::vector<List>& lists, Device device) {
  const auto found = std::find_if(lists.begin(), lists.end(),
                                  [&](const List& list) { return list.device == device; });
  if (found != lists.end()) return *found;
  return lists.emplace_back(List{device, {}, {}, {}});
}

/// A gradient or a stashed sum, or both.
bool has_pending(const Tensor& parameter) {
  const core::GradientSlot* slot = parameter.gradient_slot_or_null();
  return slot != nullptr && parameter.requires_grad() &&
         (slot->holds_gradient() || slot->has_sum());
}

void check_norm_type(double type) {
  CAIRN_CHECK(type >= 1, "optimizer", "expected a norm type >= 1, got ", type);
}

}  // namespace

/// What ranks have reduced must be whole on the device before a step is queued behind it: a
/// collective that is aborted ends as if it had succeeded.
void Optimizer::wait_for_reductions() const {
  check_not_moved();
  Reducers reducers;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
      const core::GradientSlot* slot = parameter.tensor.gradient_slot_or_null();
      if (slot != nullptr) add_reducer(reducers, slot->reducer());
    }
  }
  for (const auto& reducer : reducers) reducer->reduce_pending();
}

void Optimizer::prepare_gradients() const {
  std::vector<Tensor> beside_sums;
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) {
      if (!tensor.requires_grad()) continue;
      core::GradientSlot& slot = tensor.gradient_slot();
      slot.check_whole(name);
      CAIRN_CHECK(slot.claim(identity_), "optimizer", "expected parameters of one optimizer, got '",
                  name, "', which another optimizer steps too");
      if (slot.has_sum()) beside_sums.push_back(tensor);
    }
  }
  gradients::stash(beside_sums);
}

void Optimizer::check_scaler(std::uint64_t scaler) const {
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) {
      if (!has_pending(tensor)) continue;
      const std::uint64_t whose = tensor.gradient_slot().scale().scaler;
      CAIRN_CHECK(whose == scaler, "optimizer", "expected ",
                  scaler == 0 ? "gradients that nobody scaled" : "gradients that amp scaled",
                  ", got '", name, "' ",
                  whose == 0    ? "whose loss went through a plain backward"
                  : scaler == 0 ? "whose loss amp scaled"
                                : "whose loss another amp::Amp scaled",
                  whose == 0 ? " (precision.backward(loss), or precision.adopt_gradients() for "
                               "gradients scaled by hand)"
                             : " (step with precision.step(), the amp::Amp that scaled the loss)");
    }
  }
}

/// The gradient that a step would use: the stashed sum, or what the slot holds; null: none.
const Tensor* Optimizer::gradient_of(std::size_t group, std::size_t index) const {
  const NamedTensor& parameter = groups_[group].parameters[index];
  if (!parameter.tensor.requires_grad() || parameter.tensor.gradient_slot_or_null() == nullptr) {
    return nullptr;
  }
  const core::GradientSlot& slot = parameter.tensor.gradient_slot();
  slot.check_whole(parameter.name);
  if (slot.has_sum()) return &slot.sum();
  return slot.holds_gradient() ? &slot.memory() : nullptr;
}

bool Optimizer::has_gradient() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const ParameterGroup& group) {
    return std::any_of(group.parameters.begin(), group.parameters.end(),
                       [](const NamedTensor& parameter) { return has_pending(parameter.tensor); });
  });
}

PendingReport Optimizer::begin_check(double norm_type) const {
  wait_for_reductions();
  prepare_gradients();
  return begin_own_check(norm_type);
}

PendingReport Optimizer::begin_own_check(double norm_type) const {
  check_norm_type(norm_type);
  std::vector<double> types{norm_type};
  const auto need = [&](double type) {
    if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(type);
  };
  if (larc_ || own_max_norm() > 0) need(2.0);
  if (const std::optional<double> type = running_norm_type()) need(*type);

  std::vector<List> lists;
  std::size_t parameter = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i, ++parameter) {
      const Tensor* gradient = gradient_of(g, i);
      if (gradient == nullptr) continue;
      List& list = list_of(lists, gradient->device());
      list.views.push_back(*gradient);
      list.parameters.push_back(parameter);
      if (!larc_) continue;
      const Tensor& weight = groups_[g].parameters[i].tensor;
      const auto* master = kernels::MasterWeight::of(weight);
      const bool exact = master != nullptr && master->storage() == MasterStorage::f32 &&
                         master->tensor().numel() == weight.numel();  // else another rank asks
      list.weights.push_back(exact ? master->tensor() : weight);
    }
  }

  PendingReport pending;
  pending.optimizer_ = this;
  pending.norm_type_ = norm_type;
  pending.types_ = types;
  pending.has_weights_ = larc_ != nullptr;
  for (const List& list : lists) {
    for (const double type : types) {
      pending.passes_.push_back({PendingReport::Of::gradients, type, list.parameters,
                                 kernels::check_tensors(list.views, type)});
    }
    if (list.weights.empty()) continue;
    pending.passes_.push_back({PendingReport::Of::weights, 2.0, list.parameters,
                               kernels::check_tensors(list.weights, 2.0)});
  }
  return pending;
}

PendingReport Optimizer::stash(double scale) {
  CAIRN_CHECK(std::isfinite(scale), "optimizer", "expected a finite scale to stash with, got ",
              scale);
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) tensor.gradient_slot().check_whole(name);
  }
  std::vector<Tensor> tensors;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) tensors.push_back(parameter.tensor);
  }
  PendingReport pending;
  pending.optimizer_ = this;
  pending.types_ = {2.0};
  for (gradients::StashPass& pass : gradients::stash(tensors, scale)) {
    pending.passes_.push_back(
        {PendingReport::Of::gradients, 2.0, std::move(pass.tensors), std::move(pass.check)});
  }
  return pending;
}

void Optimizer::clear_grad() {
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) Tensor(parameter.tensor).clear_grad();
  }
}

}  // namespace cairn::optim
