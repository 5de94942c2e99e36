// Which backwards the gradients of each optimizer come from: at which scale they lie, and what
// their checks found.
//
// The backwards of one loss that reach the same optimizers, since their last step, are one Segment.
// The gradients that lie in an optimizer's slots belong to one segment, its open one. Before a
// backward of another segment they are stashed: checked, unscaled and added to f32 sums. A step
// reads what all segments of its optimizers found, at once.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "cairn/optim/optimizer.h"

namespace cairn::amp {

struct Segment {
  int loss_id = 0;
  double scale = 1.0;
  bool unscale_delayed = false;  // by the last of its backwards
  bool check_delayed = false;
  std::vector<std::size_t> optimizers;        // ascending
  std::vector<optim::PendingReport> pending;  // launched
  std::vector<optim::NonFinite> nonfinite;    // read
};
using SegmentPtr = std::shared_ptr<Segment>;

class GradientSegments {
 public:
  struct Optimizer {
    optim::Optimizer* optimizer = nullptr;
    SegmentPtr open;        // whose scaled gradients lie in its slots
    bool poisoned = false;  // skips its next step: one of its losses overflowed
    bool left = false;  // what its slots hold is of losses that have ended: the next one stashes it
  };
  /// A step's view: every segment of its optimizers, resolved, and each optimizer's own report.
  struct Resolved {
    std::vector<SegmentPtr> segments;
    std::vector<optim::GradientReport> reports;  // of the step's optimizers, in their order
    std::vector<double> scales;                  // what their gradients are still multiplied by
  };

  explicit GradientSegments(const std::vector<optim::Optimizer*>& optimizers);

  /// Before a backward of this loss that reaches these optimizers.
  Segment& begin(int loss_id, double scale, const std::vector<std::size_t>& optimizers);
  /// In a step of these optimizers: checks what was not checked and reads everything, once.
  /// Gradients that came without begin() count as loss 0's, unscaled. Reads nothing where neither the options nor a rule ask for it.
  Resolved resolve(const std::vector<std::size_t>& optimizers, const optim::StepOptions& options);
  /// After a step that ended losses which reach these, on any rank: what is in their slots belongs to none.
  void leave(const std::set<std::size_t>& optimizers);
  /// After a step: their gradients are gone.
  void end(const std::vector<std::size_t>& optimizers);
  /// The same where nobody reads what was found: the segments are over.
  void forget(const std::vector<std::size_t>& optimizers);
  /// A state was loaded: nothing is pending, no gradient is there.
  void reset();

  std::vector<Optimizer>& optimizers() { return optimizers_; }
  const std::vector<Optimizer>& optimizers() const { return optimizers_; }
  std::size_t size() const { return optimizers_.size(); }
  std::size_t index_of(const optim::Optimizer& optimizer, const char* where) const;

 private:
  void stash(std::size_t optimizer);
  std::vector<SegmentPtr> take_segments_of(const std::vector<std::size_t>& optimizers);

  std::vector<Optimizer> optimizers_;
  std::vector<SegmentPtr> segments_;  // not resolved yet, in order of their first backward
};

}  // namespace cairn::amp
