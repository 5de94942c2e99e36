// What stands in a step beside what blocks were measured with, where ranks divide gradients and
// weights among each other (parallel::ShardedDataParallel).
#pragma once

#include <cstddef>
#include <vector>

namespace cairn::checkpointing {

/// Of one block. Bytes.
struct BlockBeside {
  std::size_t weights = 0;        // of its own: whole while it is at work
  std::size_t gathering = 0;      // beside them while they are gathered
  std::vector<std::size_t> ties;  // blocks before it whose weights it uses as well
  std::size_t gradients = 0;      // of all blocks: the most that stands while its backward runs
};
struct ChainBeside {
  std::vector<BlockBeside> blocks;  // empty: nothing stands beside
  std::size_t gradients = 0;        // of the backward before, during the forward
};

/// Which weights are whole, or on their way, as a step goes on: a block's are gathered for its
/// forward and for its backward (or the replay before that), those of the next one meanwhile.
class GatheredWeights {
 public:
  explicit GatheredWeights(const std::vector<BlockBeside>& blocks)
      : blocks_(blocks), here_(blocks.size(), false) {}

  /// A block begins. Returns what stands at most while its weights come.
  std::size_t bring(std::size_t block, bool backwards);
  /// Its forward is over, or its gradients are there.
  void let_go(std::size_t block);
  void let_go_of_all();
  std::size_t bytes() const { return bytes_; }

 private:
  void take(std::size_t block);
  bool has_weights(std::size_t block) const { return blocks_[block].weights > 0; }

  const std::vector<BlockBeside>& blocks_;
  std::vector<bool> here_;  // by block
  std::size_t bytes_ = 0;
};

}  // namespace cairn::checkpointing
