// The two groups of ranks of hybrid sharding: neighbours divide one copy, and those with the same
// part of each copy hold it alike.
#pragma once

#include <string_view>

#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// The `within` neighbours in rank order that divide a copy with this rank; 0: all ranks. A
/// collective. Throws InvalidArgument, on every rank, where `within` does not divide the number of
/// ranks or is another one elsewhere; `option` is its name.
ProcessGroup shard_group(const ProcessGroup& group, int within,
                         std::string_view option = "shard_within");
/// Those that have this rank's part, of each copy; with 0 this rank alone, and no collective.
/// Throws as shard_group().
ProcessGroup replica_group(const ProcessGroup& group, int within);

}  // namespace cairn::parallel
