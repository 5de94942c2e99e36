// Which losses the gradients of each optimizer come from: at which scale, and what their checks
// found.
//
// The backwards of one loss at one scale that were given to the same optimizers, until a step
// judges them, are one contribution. The slots that hold its gradients share it; nobody else keeps
// it: gradients that are cleared by hand take what was found in them along. A step judges every
// contribution that its optimizers hold: its loss's scaler moves once, and whoever holds one that
// overflowed skips, in this step or a later one.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cairn/gradients/stash.h"
#include "cairn/optim/optimizer_access.h"

namespace cairn::amp {

class LossContributions;

struct LossContribution final : gradients::CheckedContribution {
  std::string describe() const override;

  const LossContributions* owner = nullptr;
  std::uint64_t number = 0;  // ascending by first backward
  int loss_id = 0;
  double scale = 1.0;
  std::vector<std::size_t> optimizers;  // ascending: those that the loss was given to
  bool unscale_delayed = false;         // by the last of its backwards
  bool check_delayed = false;
  bool judged = false;
  bool overflowed = false;  // on some rank
  std::vector<optim::NonFinite> nonfinite;
};
using LossContributionPtr = std::shared_ptr<LossContribution>;

struct ByFirstBackward {
  bool operator()(const LossContributionPtr& a, const LossContributionPtr& b) const {
    return a->number < b->number;
  }
};
using HeldContributions = std::set<LossContributionPtr, ByFirstBackward>;

class LossContributions {
 public:
  /// A step's view of some optimizers.
  struct Resolved {
    HeldContributions unjudged;                  // by them
    std::vector<optim::GradientReport> reports;  // in the optimizers' order
    std::vector<double> scales;                  // what their gradients are still multiplied by
  };

  explicit LossContributions(std::vector<optim::Optimizer*> optimizers)
      : optimizers_(std::move(optimizers)) {}

  /// Of the next backward of this loss: the one that its optimizers' gradients are in already, or a
  /// new one.
  LossContributionPtr open(int loss_id, double scale, const std::vector<std::size_t>& optimizers);
  /// Gradients of this optimizer that came by another way than a loss of this handle's are
  /// `scale`'s.
  void adopt(std::size_t optimizer, const core::GradientScale& scale);
  /// Those that the optimizer's slots and their sums hold.
  HeldContributions held_by(std::size_t optimizer) const;
  /// In a step of these optimizers: checks what was not checked and reads everything, once. Where
  /// their gradients have more than one scale they are added up, unscaled. Gradients that came
  /// without open() count as loss 0's, unscaled. Reads nothing where neither the options nor a rule
  /// ask for it.
  Resolved resolve(const std::vector<std::size_t>& optimizers, const optim::StepOptions& options);
  /// The losses of these are over, as nobody asks what they found.
  void end(const std::vector<std::size_t>& optimizers);
  /// A state was loaded: no gradient is there.
  void reset();

  optim::Optimizer& operator[](std::size_t index) const { return *optimizers_[index]; }
  const std::vector<optim::Optimizer*>& optimizers() const { return optimizers_; }
  std::size_t size() const { return optimizers_.size(); }
  /// Throws InvalidArgument for one that amp::initialize was not given, or that was moved from
  /// since.
  std::size_t index_of(const optim::Optimizer& optimizer, const char* where) const;

 private:
  HeldContributions unjudged_of(const std::vector<std::size_t>& optimizers) const;
  std::vector<optim::PendingReport> check_later_ones(const LossContribution& contribution,
                                                     const std::vector<std::size_t>& stepping,
                                                     double norm_type) const;
  std::vector<optim::NonFinite> nonfinite_in(const std::vector<gradients::Check>& checks) const;

  std::vector<optim::Optimizer*> optimizers_;
  std::vector<std::weak_ptr<LossContribution>> open_;
  std::uint64_t last_number_ = 0;
};

}  // namespace cairn::amp
