// What the operations of a block take, one by one, and so which results are worth their memory.
#pragma once

#include <cstddef>
#include <vector>

#include "cairn/checkpointing/planner.h"

namespace cairn::checkpointing {

/// An operation that a replay runs, as policies see it.
struct MeteredOperation {
  SegmentOperation operation;
  double replay_seconds = 0;  // up to the last tensor that the block's backward needs
  std::size_t bytes = 0;      // of the result, and of what else it makes for its own backward
  bool view = false;          // the result lies in an input
  double after_seconds = 0;   // from its end to the end of the forward
};

struct MeteredForward {
  std::vector<MeteredOperation> operations;  // in order
  double seconds = 0;
  double tail_seconds = 0;  // after the last saved tensor

  /// Nothing, the results that take most time for their bytes, these and the next ones ...: at most
  /// kMostSelections sets, each within the next. What takes hardly any time is in none.
  std::vector<KeptResults> selections() const;
  double tail_seconds_of(const KeptResults& results) const;
  /// Of the time of a replay with nothing kept, what one with these results takes.
  double replayed_share(const KeptResults& results) const;
  /// The same ones, on tensors of the same sizes.
  bool same_operations(const MeteredForward& other) const;

  static constexpr std::size_t kMostSelections = 8;
};

/// Runs the block forward, each operation by itself on the device; the fastest of `repeats` counts.
MeteredForward measure_operations(const Segment& block, const Tensor& x, int repeats);

}  // namespace cairn::checkpointing
