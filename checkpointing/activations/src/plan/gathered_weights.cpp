#include "plan/gathered_weights.h"

#include <algorithm>

namespace cairn::checkpointing {

std::size_t GatheredWeights::bring(std::size_t block, bool backwards) {
  if (blocks_.empty()) return 0;
  std::size_t gathering = here_[block] ? 0 : blocks_[block].gathering;
  take(block);
  for (const std::size_t tie : blocks_[block].ties) {
    if (!here_[tie]) gathering = std::max(gathering, blocks_[tie].gathering);
    take(tie);
  }
  if (!has_weights(block)) return bytes_ + gathering;
  std::size_t next = block;
  do {
    next += backwards ? std::size_t{0} - 1 : 1;
  } while (next < blocks_.size() && !has_weights(next));
  if (next < blocks_.size()) {  // one before the first is past the end, too
    if (!here_[next]) gathering = std::max(gathering, blocks_[next].gathering);
    take(next);
  }
  return bytes_ + gathering;
}

void GatheredWeights::take(std::size_t block) {
  if (here_[block]) return;
  here_[block] = true;
  bytes_ += blocks_[block].weights;
}

void GatheredWeights::let_go(std::size_t block) {
  if (blocks_.empty() || !here_[block]) return;
  here_[block] = false;
  bytes_ -= blocks_[block].weights;
}

void GatheredWeights::let_go_of_all() {
  here_.assign(here_.size(), false);
  bytes_ = 0;
}

}  // namespace cairn::checkpointing
