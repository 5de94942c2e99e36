// A long chain as one of fewer blocks: neighbours are kept or recomputed alike.
#pragma once

#include <cstddef>
#include <vector>

#include "cairn/checkpointing/planner.h"

namespace cairn::checkpointing {

class MergedChain {
 public:
  /// Runs of neighbours, equal in number but for one, so that there are at most `most` of them.
  MergedChain(const std::vector<BlockProfile>& blocks, std::size_t most);

  /// What they take together: times are sums, memory at most that.
  const std::vector<BlockProfile>& blocks() const { return merged_; }
  /// A schedule of these as one of the chain.
  Schedule expanded(const Schedule& schedule) const;

 private:
  BlockProfile merge(std::size_t begin, std::size_t end) const;
  void expand(const SchedulePart& part, Schedule& schedule) const;

  std::vector<BlockProfile> blocks_, merged_;
  std::vector<std::size_t> begin_;  // of each merged block, and the end
};

}  // namespace cairn::checkpointing
