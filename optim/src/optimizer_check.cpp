// Pass 1: what the gradients are, and gathering those of several backwards.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "cairn/gradients/stash.h"
#include "cairn/optim/optimizer.h"
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
  std::vector<Tensor> beside_sums;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.tensor.requires_grad()) continue;
    core::GradientSlot& slot = parameter.tensor.gradient_slot();
    slot.check_whole(parameter.name);
    CAIRN_CHECK(slot.claim(identity_), "optimizer", "expected parameters of one optimizer, got '",
                parameter.name, "', which another optimizer steps too");
    if (slot.holds_part() && updates_whole_tensors()) {
      core::fail<core::Unsupported>("optimizer", "expected whole gradients for ", kind(),
                                    ", got this rank's part of '", parameter.name,
                                    "' (ZeroStage::optimizer_states)");
    }
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

/// The f32 master where these elements of it are here (else another rank asks), or the weight.
TensorView exact_weight(const Tensor& weight, core::ElementRange elements) {
  const auto* master = kernels::MasterWeight::of(weight);
  const bool has_it = master != nullptr && master->storage() == MasterStorage::f32 &&
                      master->tensor().numel() == elements.size();
  if (has_it) return master->tensor();
  const bool whole = elements.size() == weight.numel() && !core::WeightInParts::of(weight);
  return whole ? weight.view() : core::part_of_weight(weight, elements);
}

/// A piece of what lies here, [n] of `here`.
TensorView piece_of(const TensorView& x, core::ElementRange here, core::ElementRange piece) {
  return piece == here ? x : x.slice(0, piece.begin - here.begin, piece.end - here.begin);
}

/// The elements of the parameter of which this rank has the gradient.
core::ElementRange elements_of(const Tensor& parameter) {
  const core::GradientSlot& slot = parameter.gradient_slot();
  if (!slot.holds_part()) return {0, parameter.numel()};
  const auto reducer = slot.reducer();
  CAIRN_CHECK(reducer, "optimizer",
              "expected the ShardedDataParallel that divided the gradient of '", parameter.name(),
              "' to live until the step, got one that has ended");
  const core::GradientReducer::Sharding ranks = reducer->sharding();
  return core::even_part(parameter.numel(), ranks.rank, ranks.world_size);
}

/// A whole gradient is checked in one piece.
std::vector<core::ElementRange> checked_together(const Tensor& parameter, core::ElementRange here) {
  if (!parameter.gradient_slot().holds_part()) return {here};
  return kernels::pieces_of(here, parameter.numel());
}

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
  for (const Device device : devices) {
    std::vector<std::size_t> indices;
    std::vector<core::ElementRange> elements;
    std::vector<TensorView> gradients, weights;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor* gradient = gradient_of(parameters_[i]);
      if (gradient == nullptr || gradient->device() != device) continue;
      const core::ElementRange here = elements_of(parameters_[i].tensor);
      pending.divided_ = pending.divided_ || parameters_[i].tensor.gradient_slot().holds_part();
      const TensorView weight = larc_ ? exact_weight(parameters_[i].tensor, here) : TensorView();
      for (const core::ElementRange& piece : checked_together(parameters_[i].tensor, here)) {
        indices.push_back(i);
        elements.push_back(piece);
        gradients.push_back(piece_of(*gradient, here, piece));
        if (larc_) weights.push_back(piece_of(weight, here, piece));
      }
    }
    for (std::size_t k = 0; k < types.size(); ++k) {
      pending.passes_.push_back(
          {false, k, indices, elements, kernels::check_tensors(gradients, types[k])});
    }
    if (!larc_) continue;
    pending.passes_.push_back({true, 0, indices, elements, kernels::check_tensors(weights, 2.0)});
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

namespace {

/// Of gradients by type, and of weights where the optimizer needs their norms.
std::vector<FoundChecks::OfParameters*> all_of(FoundChecks& found) {
  std::vector<FoundChecks::OfParameters*> all;
  for (FoundChecks::OfParameters& of_type : found.gradients) all.push_back(&of_type);
  if (!found.weights.empty()) all.push_back(&found.weights);
  return all;
}

/// What this rank found in its parts of some parameters, and what another one did.
std::string pack(FoundChecks& found, const std::vector<std::size_t>& parameters) {
  core::Packer packer;
  for (const FoundChecks::OfParameters* of : all_of(found)) {
    for (const std::size_t p : parameters) {
      packer.number((*of)[p].size());
      for (const auto& [elements, check] : (*of)[p]) {
        packer.number(static_cast<std::uint64_t>(elements.begin));
        packer.number(static_cast<std::uint64_t>(elements.end));
        packer.real(check.power_sum).number(static_cast<std::uint64_t>(check.nonfinite));
        packer.number(static_cast<std::uint64_t>(check.nan));
      }
    }
  }
  return packer.bytes();
}

void append(const std::string& told, const std::vector<std::size_t>& parameters,
            FoundChecks& found) {
  core::Unpacker unpacker(told);
  const auto number = [&] { return static_cast<std::int64_t>(unpacker.number()); };
  for (FoundChecks::OfParameters* of : all_of(found)) {
    for (const std::size_t p : parameters) {
      for (std::uint64_t left = unpacker.count(40); left > 0; --left) {
        kernels::CheckedPiece piece;
        piece.elements.begin = number();
        piece.elements.end = number();
        piece.check.power_sum = unpacker.real();
        piece.check.nonfinite = number();
        piece.check.nan = number();
        (*of)[p].push_back(piece);
      }
    }
  }
}

}  // namespace

GradientReport Optimizer::complete(const GradientReport& report) const {
  if (!report.of_parts) return report;
  FoundChecks all = *report.of_parts;
  Reducers reducers;
  for (const Parameter& parameter : parameters_) {
    if (parameter.tensor.gradient_slot().holds_part())
      add_reducer(reducers, parameter.tensor.gradient_slot().reducer());
  }
  for (const auto& reducer : reducers) {
    std::vector<std::size_t> theirs;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const core::GradientSlot& slot = parameters_[i].tensor.gradient_slot();
      if (slot.holds_part() && slot.reducer() == reducer) theirs.push_back(i);
    }
    const std::string own = pack(all, theirs);
    for (FoundChecks::OfParameters* of : all_of(all)) {
      for (const std::size_t p : theirs) (*of)[p].clear();
    }
    for (const std::string& told : reducer->exchange(own, "what is in parts of gradients"))
      append(told, theirs, all);
  }
  return make_report(groups_, all);
}

void Optimizer::clear_grad() {
  for (const Parameter& parameter : parameters_) Tensor(parameter.tensor).clear_grad();
}

}  // namespace cairn::optim
