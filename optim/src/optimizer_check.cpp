// Pass 1: what the gradients are, and gathering those of several backwards.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/core/file_memory.h"
#include "cairn/gradients/stash.h"
#include "cairn/optim/optimizer.h"
#include "exchange_parts.h"
#include "layout.h"

namespace cairn::optim {

/// What ranks have reduced must be whole on the device before a step is queued behind it: a
/// collective that is aborted ends as if it had succeeded.
void Optimizer::wait_for_reductions() const {
  check_not_moved();
  Reducers reducers;
  for (const Parameter& parameter : parameters_) {
    add_reducer(reducers, parameter.tensor.gradient_slot().reducer());
  }
  for (const auto& reducer : reducers) reducer->reduce_pending();
}

void Optimizer::prepare_gradients() const {
  check_ended();
  std::vector<Tensor> beside_sums;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.tensor.requires_grad()) continue;
    core::GradientSlot& slot = parameter.tensor.gradient_slot();
    slot.check_whole(parameter.name);
    CAIRN_CHECK(slot.claim(identity_), "optimizer", "expected parameters of one optimizer, got '",
                parameter.name, "', which another optimizer steps too");
    if (slot.has_sum()) beside_sums.push_back(parameter.tensor);
  }
  gradients::stash(beside_sums);
}

void Optimizer::check_scaler(std::uint64_t scaler) const {
  for (const Parameter& parameter : parameters_) {
    if (gradient_of(parameter) == nullptr) continue;
    const std::uint64_t whose = parameter.tensor.gradient_slot().scale().scaler;
    CAIRN_CHECK(whose == scaler, "optimizer", "expected ",
                scaler == 0 ? "gradients that nobody scaled" : "gradients that amp scaled",
                ", got '", parameter.name, "' ",
                whose == 0    ? "whose loss went through a plain backward"
                : scaler == 0 ? "whose loss amp scaled"
                              : "whose loss another amp::Amp scaled",
                whose == 0 ? " (precision.backward(loss), or precision.adopt_gradients() for "
                             "gradients scaled by hand)"
                           : " (step with precision.step(), the amp::Amp that scaled the loss)");
  }
}

const Tensor* Optimizer::gradient_of(const Parameter& parameter) {
  if (!parameter.tensor.requires_grad()) return nullptr;
  const core::GradientSlot& slot = parameter.tensor.gradient_slot();
  if (slot.has_sum()) return &slot.sum();
  return slot.holds_gradient() ? &slot.memory() : nullptr;
}

bool Optimizer::has_gradient() const {
  return std::any_of(parameters_.begin(), parameters_.end(), gradient_of);
}

PendingReport Optimizer::begin_check(double norm_type) const {
  wait_for_reductions();
  prepare_gradients();
  return begin_own_check(norm_type);
}

namespace {

/// These elements of the f32 master, or of the weight where it has none, or will have none once it
/// is updated.
TensorView exact_weight(const Tensor& weight, const OwnedRange& part, MasterStorage masters) {
  const auto* master = kernels::MasterWeight::of(weight);
  const bool has_master =
      master != nullptr && master->storage() == MasterStorage::f32 && masters == MasterStorage::f32;
  if (!part) return has_master ? master->tensor().view() : weight.view();
  if (!has_master) return core::part_of_weight(weight, *part);
  const TensorView view = master->tensor();
  return view.numel() == part->size() ? view : core::part_of(view, *part);
}

/// The elements of the parameter of which this rank has the gradient.
core::ElementRange elements_of(const Tensor& parameter) {
  const core::GradientSlot& slot = parameter.gradient_slot();
  if (!slot.holds_part()) return {0, parameter.numel()};
  const auto reducer = slot.reducer();
  CAIRN_CHECK(reducer, "optimizer",
              "expected the ShardedDataParallel that divided the gradient of '", parameter.name(),
              "' to live until the step, got one that has ended");
  const core::GradientReducer::OwnPart ranks = reducer->own_part();
  return core::even_part(parameter.numel(), ranks.rank, ranks.world_size);
}

/// What one pass checks: whole tensors, and parts in pieces.
struct CheckedList {
  std::vector<std::size_t> parameters;
  std::vector<core::ElementRange> elements;
  std::vector<TensorView> views;

  void add(std::size_t parameter, const TensorView& whole) {
    add_piece(parameter, {0, whole.numel()}, whole);
  }
  /// Elements `part` of `numel`.
  void add(std::size_t parameter, const TensorView& x, core::ElementRange part,
           std::int64_t numel) {
    for (const core::ElementRange& piece : kernels::pieces_of(part, numel))
      add_piece(parameter, piece, x.slice(0, piece.begin - part.begin, piece.end - part.begin));
  }
  std::vector<CheckedList> each() const {
    std::vector<CheckedList> lists;
    for (std::size_t k = 0; k < views.size(); ++k) {
      lists.push_back({{parameters[k]}, {elements[k]}, {views[k]}});
    }
    return lists;
  }

 private:
  void add_piece(std::size_t parameter, core::ElementRange piece, const TensorView& view) {
    parameters.push_back(parameter);
    elements.push_back(piece);
    views.push_back(view);
  }
};

}  // namespace

PendingReport Optimizer::begin_own_check(double norm_type) const {
  CAIRN_CHECK(norm_type >= 1, "optimizer", "expected a norm type >= 1, got ", norm_type);
  std::vector<double> types{norm_type};
  const auto need = [&](double type) {
    if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(type);
  };
  if (larc_ || own_max_norm() > 0) need(2.0);
  if (const std::optional<double> type = running_norm_type()) need(*type);

  std::vector<Device> devices;
  for (const Parameter& parameter : parameters_) {
    if (parameter.tensor.requires_grad())
      parameter.tensor.gradient_slot().check_whole(parameter.name);
    const Tensor* gradient = gradient_of(parameter);
    const bool is_known = gradient == nullptr || std::find(devices.begin(), devices.end(),
                                                           gradient->device()) != devices.end();
    if (!is_known) devices.push_back(gradient->device());
  }
  PendingReport pending;
  pending.optimizer_ = this;
  pending.types_ = types;
  pending.has_weights_ = larc_ != nullptr;
  const Partition ranks = larc_ ? partition() : Partition();
  for (const Device device : devices) {
    CheckedList gradients, weights;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor& tensor = parameters_[i].tensor;
      const Tensor* gradient = gradient_of(parameters_[i]);
      if (gradient == nullptr || gradient->device() != device) continue;
      if (tensor.gradient_slot().holds_part()) {
        gradients.add(i, *gradient, elements_of(tensor), tensor.numel());
        pending.divided_ = true;
      } else {
        gradients.add(i, *gradient);
      }
      if (!larc_) continue;
      const OwnedRange part = ranks.own_part(i);
      const TensorView weight = exact_weight(tensor, part, state_options_.masters);
      part ? weights.add(i, weight, *part, tensor.numel()) : weights.add(i, weight);
      pending.divided_ = pending.divided_ || part;
    }
    for (std::size_t k = 0; k < types.size(); ++k) {
      pending.passes_.push_back({false, k, gradients.parameters, gradients.elements,
                                 kernels::check_tensors(gradients.views, types[k])});
    }
    if (!larc_) continue;
    const bool elsewhere = lie_elsewhere(state_options_);
    for (const CheckedList& list : elsewhere ? weights.each() : std::vector{weights}) {
      pending.passes_.push_back(
          {true, 0, list.parameters, list.elements, kernels::check_tensors(list.views, 2.0)});
      if (elsewhere) core::leave_to_file(list.views.front());
    }
  }
  return pending;
}

PendingReport Optimizer::stash(double scale) {
  CAIRN_CHECK(std::isfinite(scale), "optimizer", "expected a finite scale to stash with, got ",
              scale);
  std::vector<Tensor> tensors;
  for (const Parameter& parameter : parameters_) {
    parameter.tensor.gradient_slot().check_whole(parameter.name);
    tensors.push_back(parameter.tensor);
  }
  PendingReport pending;
  pending.optimizer_ = this;
  pending.types_ = {2.0};
  for (gradients::StashPass& pass : gradients::stash(tensors, scale)) {
    std::vector<core::ElementRange> elements;
    for (const std::size_t i : pass.tensors) {
      elements.push_back(elements_of(tensors[i]));
      pending.divided_ = pending.divided_ || tensors[i].gradient_slot().holds_part();
    }
    pending.passes_.push_back(
        {false, 0, std::move(pass.tensors), std::move(elements), std::move(pass.check)});
  }
  return pending;
}

GradientReport Optimizer::complete(const GradientReport& report) const {
  if (!report.of_parts) return report;
  FoundChecks all = *report.of_parts;
  const Partition ranks = partition();
  std::vector<bool> gradients, weights;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    gradients.push_back(parameters_[i].tensor.gradient_slot().holds_part());
    weights.push_back(ranks.own_part(i).has_value());
  }
  std::vector<FoundInParts> lists;
  for (FoundChecks::OfParameters& of_type : all.gradients) lists.push_back({of_type, gradients});
  if (!all.weights.empty()) lists.push_back({all.weights, weights});
  exchange_parts(ranks, lists, "what is in parts of gradients");
  return make_report(groups_, all);
}

void Optimizer::clear_grad() {
  for (const Parameter& parameter : parameters_) Tensor(parameter.tensor).clear_grad();
}

}  // namespace cairn::optim
