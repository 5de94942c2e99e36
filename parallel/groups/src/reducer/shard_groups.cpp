#include "reducer/shard_groups.h"

#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

void check_within(const ProcessGroup& group, int within, std::string_view option) {
  const int ranks = group.world_size();
  const auto told = group.world().all_or_throw("the ranks that divide a copy", [&] {
    CAIRN_CHECK(within >= 0 && (within == 0 || ranks % within == 0), "sharding", "expected ",
                option, " to divide the number of ranks, ", ranks, ", got ", within,
                " (0: all of them)");
    return std::to_string(within);
  });
  for (std::size_t rank = 1; rank < told.size(); ++rank) {
    CAIRN_CHECK(told[rank] == told[0], "sharding", "expected one ", option, " on all ranks, got ",
                told[0], " on rank 0 and ", told[rank], " on rank ", rank);
  }
}

}  // namespace

ProcessGroup shard_group(const ProcessGroup& group, int within, std::string_view option) {
  check_within(group, within, option);
  if (within == 0 || within == group.world_size()) return group;
  return group.split(group.rank() / within, 0, "of a shard group");
}

ProcessGroup replica_group(const ProcessGroup& group, int within) {
  if (within == 0) return ProcessGroup::single();
  check_within(group, within, "shard_within");
  if (within == group.world_size()) return ProcessGroup::single();
  return group.split(group.rank() % within, 0, "of replicas");
}

}  // namespace cairn::parallel
