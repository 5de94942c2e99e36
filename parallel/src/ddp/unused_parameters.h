// Which trained parameters the losses of a window reach: find_unused_parameters and static_graph.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "cairn/parallel/process_group.h"
#include "ddp/held_gradients.h"

namespace cairn::parallel {

/// By parameter, frozen ones too.
struct ReachedParameters {
  std::vector<bool> by_loss;    // of the backward that begins
  std::vector<bool> in_window;  // by it or by one since the last step
};

class UnusedParameters {
 public:
  explicit UnusedParameters(bool static_graph) : static_graph_(static_graph) {}

  /// What some rank's losses reached. A collective, with static_graph only in the first backward.
  /// held: but for its bits; throws InvalidArgument, on every rank, where another's losses differ.
  /// shadows: this rank's loss is a Join's zero(), which reaches everything and says nothing.
  /// name: the collective's. Returns whether some rank's arena has f32 slots.
  bool agree(const ReachedParameters& own, HeldGradients held, bool shadows,
             const ProcessGroup& group, const std::string& name);
  bool reached_somewhere(std::size_t parameter) const { return somewhere_.at(parameter); }
  /// With static_graph: the first parameter that this loss, and not the first one, reaches, or the
  /// other way round.
  struct Change {
    std::size_t parameter = 0;
    bool reached_now = false;
  };
  std::optional<Change> changed_since_first(const ReachedParameters& own) const;
  /// The trained parameters are other ones.
  void forget();

  /// Not reached on this rank since the last step.
  std::vector<std::string> names;

 private:
  bool static_graph_;
  bool known_ = false;           // somewhere_ is that of the first backward
  std::vector<bool> somewhere_;  // reached on any rank
  std::vector<bool> first_;      // by this rank's first loss; empty: it had none
};

}  // namespace cairn::parallel
