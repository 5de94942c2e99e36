// A training that ranks divide at a stage of ZeRO's, beside the same one that they do not.
#pragma once

#include <memory>
#include <string>

#include "cairn/parallel/process_group.h"

namespace cairn::test {

class ShardedJob {
 public:
  virtual ~ShardedJob() = default;
  /// Of both. Returns what differs; empty: nothing.
  virtual std::string step() = 0;
};

std::unique_ptr<ShardedJob> make_sharded_job(int stage, const parallel::ProcessGroup& group);

}  // namespace cairn::test
