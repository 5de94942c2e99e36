#include "loss_contributions.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::amp {

namespace {

using core::Contribution;
using Indices = std::vector<std::size_t>;

/// Calls f(slot) for every slot of the optimizer's that holds something to be stepped.
template <class F>
void each_slot(const optim::Optimizer& optimizer, F&& f) {
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const auto& [name, tensor] : group.parameters) {
      if (!tensor.requires_grad() || tensor.gradient_slot_or_null() == nullptr) continue;
      core::GradientSlot& slot = tensor.gradient_slot();
      if (slot.holds_gradient() || slot.has_sum()) f(slot);
    }
  }
}

LossContributionPtr own_one(const std::shared_ptr<Contribution>& one,
                            const LossContributions* owner) {
  auto loss = std::dynamic_pointer_cast<LossContribution>(one);
  return loss && loss->owner == owner ? loss : nullptr;
}

/// What the optimizer's gradients are multiplied by; none: they have several scales, or lie in
/// sums.
std::optional<double> only_factor(const optim::Optimizer& optimizer) {
  const core::GradientScale* first = nullptr;
  bool one = true;
  each_slot(optimizer, [&](const core::GradientSlot& slot) {
    if (first == nullptr) first = &slot.scale();
    one = one && !slot.has_sum() && slot.scale().factor == first->factor &&
          slot.scale().contribution == first->contribution;
  });
  if (!one) return std::nullopt;
  return first == nullptr ? 1.0 : first->factor;
}

}  // namespace

std::string LossContribution::describe() const {
  return core::str("loss ", loss_id, " scaled by ", scale);
}

std::size_t LossContributions::index_of(const optim::Optimizer& optimizer,
                                        const char* where) const {
  for (optim::Optimizer* one : optimizers_) optim::OptimizerAccess(*one).check_not_moved();
  const auto found = std::find(optimizers_.begin(), optimizers_.end(), &optimizer);
  CAIRN_CHECK(found != optimizers_.end(), where, "expected one of the ", optimizers_.size(),
              " optimizers that were given to amp::initialize, got another");
  return static_cast<std::size_t>(found - optimizers_.begin());
}

LossContributionPtr LossContributions::open(int loss_id, double scale, const Indices& optimizers) {
  std::erase_if(open_, [](const auto& one) {
    const auto alive = one.lock();
    return !alive || alive->judged;
  });
  for (const auto& one : open_) {
    LossContributionPtr alive = one.lock();
    const bool same = alive->loss_id == loss_id && alive->scale == scale;
    if (same && alive->optimizers == optimizers) return alive;
  }
  auto fresh = std::make_shared<LossContribution>();
  fresh->owner = this;
  fresh->number = ++last_number_;
  fresh->loss_id = loss_id;
  fresh->scale = scale;
  fresh->optimizers = optimizers;
  open_.push_back(fresh);
  return fresh;
}

void LossContributions::adopt(std::size_t optimizer, const core::GradientScale& scale) {
  each_slot(*optimizers_[optimizer], [&](core::GradientSlot& slot) {
    const core::GradientScale& now = slot.scale();
    if (!slot.holds_gradient() || now.scaler != 0 || own_one(now.contribution, this)) return;
    slot.set_scale(scale);
  });
}

HeldContributions LossContributions::held_by(std::size_t optimizer) const {
  HeldContributions held;
  const Contribution* last = nullptr;  // most slots hold the same
  const auto take = [&](const std::shared_ptr<Contribution>& one) {
    if (one.get() == std::exchange(last, one.get())) return;
    if (const LossContributionPtr own = own_one(one, this)) held.insert(own);
  };
  each_slot(*optimizers_[optimizer], [&](const core::GradientSlot& slot) {
    if (slot.holds_gradient()) take(slot.scale().contribution);
    for (const auto& one : slot.sum_contributions()) take(one);
  });
  return held;
}

HeldContributions LossContributions::unjudged_of(const Indices& optimizers) const {
  HeldContributions all;
  for (const std::size_t index : optimizers) all.merge(held_by(index));
  std::erase_if(all, [](const LossContributionPtr& one) { return one->judged; });
  return all;
}

/// What other optimizers, which step later, hold of a loss that this step judges. What lies in sums
/// was checked when it was moved.
std::vector<optim::PendingReport> LossContributions::check_later_ones(
    const LossContribution& contribution, const Indices& stepping, double norm_type) const {
  std::vector<optim::PendingReport> pending;
  for (const std::size_t index : contribution.optimizers) {
    if (std::count(stepping.begin(), stepping.end(), index) > 0) continue;
    bool holds = false, sums = false;
    each_slot(*optimizers_[index], [&](const core::GradientSlot& slot) {
      holds = holds || (slot.holds_gradient() && slot.scale().contribution.get() == &contribution);
      sums = sums || slot.has_sum();
    });
    if (!holds) continue;
    if (sums) {
      (void)optimizers_[index]->stash();
    } else {
      pending.push_back(optim::OptimizerAccess(*optimizers_[index]).begin_own_check(norm_type));
    }
  }
  return pending;
}

/// In gradients that nobody has cleared since.
std::vector<optim::NonFinite> LossContributions::nonfinite_in(
    const std::vector<gradients::Check>& checks) const {
  using Key = std::pair<const void*, std::uint64_t>;
  std::map<Key, kernels::TensorCheck> found;  // by tensor and its slot's clears
  for (const gradients::Check& check : checks) {
    const std::vector<kernels::TensorCheck> values = check.found.read();
    for (std::size_t i = 0; i < values.size(); ++i) {
      kernels::TensorCheck& sum = found[{check.tensors[i].tensor, check.tensors[i].clears}];
      sum.nonfinite += values[i].nonfinite;
      sum.nan += values[i].nan;
    }
  }
  std::vector<optim::NonFinite> named;
  for (const optim::Optimizer* optimizer : optimizers_) {
    for (const optim::ParameterGroup& group : optimizer->groups()) {
      for (const auto& [name, tensor] : group.parameters) {
        const auto at = found.find({tensor.id(), tensor.gradient_slot().clears()});
        if (at == found.end() || at->second.nonfinite == 0) continue;
        named.push_back({name, at->second.nonfinite - at->second.nan, at->second.nan});
      }
    }
  }
  return named;
}

LossContributions::Resolved LossContributions::resolve(const Indices& optimizers,
                                                       const optim::StepOptions& options) {
  const bool reads = std::any_of(optimizers.begin(), optimizers.end(), [&](std::size_t index) {
    return optim::OptimizerAccess(*optimizers_[index]).needs_report(options);
  });
  Resolved resolved;
  std::vector<optim::PendingReport> pending;
  std::vector<LossContributionPtr> sources;  // whose gradients each of them checks; null: sums
  for (const std::size_t index : optimizers) {
    optim::Optimizer& optimizer = *optimizers_[index];
    adopt(index, {0, 1.0, open(0, 1.0, {index})});
    const std::optional<double> factor = only_factor(optimizer);
    if (!factor) (void)optimizer.stash();
    const optim::OptimizerAccess parts(optimizer);
    parts.prepare_gradients();
    resolved.scales.push_back(factor.value_or(1.0));
    if (!reads) continue;
    const auto held = held_by(index);
    sources.push_back(factor && !held.empty() ? *held.begin() : nullptr);
    pending.push_back(parts.begin_own_check(options.norm_type));
  }
  resolved.unjudged = unjudged_of(optimizers);
  resolved.reports.resize(optimizers.size());
  if (!reads) return resolved;

  for (const LossContributionPtr& one : resolved.unjudged) {
    for (optim::PendingReport& later : check_later_ones(*one, optimizers, options.norm_type)) {
      pending.push_back(std::move(later));
      sources.push_back(one);
    }
  }
  std::vector<kernels::PendingCheck> stashed;
  for (const LossContributionPtr& one : resolved.unjudged) {
    for (const gradients::Check& check : one->checks) stashed.push_back(check.found);
  }
  std::vector<optim::GradientReport> reports =
      optim::OptimizerAccess::read_own(pending, std::move(stashed));
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (!sources[i]) continue;
    std::vector<optim::NonFinite>& all = sources[i]->nonfinite;
    all.insert(all.end(), reports[i].nonfinite.begin(), reports[i].nonfinite.end());
  }
  for (const LossContributionPtr& one : resolved.unjudged) {
    const auto found = nonfinite_in(std::exchange(one->checks, {}));
    one->nonfinite.insert(one->nonfinite.end(), found.begin(), found.end());
  }
  reports.resize(optimizers.size());
  resolved.reports = std::move(reports);
  return resolved;
}

void LossContributions::end(const Indices& optimizers) {
  for (const LossContributionPtr& one : unjudged_of(optimizers)) one->judged = true;
}

void LossContributions::reset() {
  open_.clear();
  for (optim::Optimizer* optimizer : optimizers_) optimizer->clear_grad();
}

}  // namespace cairn::amp
