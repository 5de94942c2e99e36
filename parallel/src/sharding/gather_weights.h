// Weights of which each rank has updated its part.
#pragma once

#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// Gives every rank all parts, in flat buffers of up to 25 MiB, one dtype and device each. A
/// collective: every rank hands in the same weights. Done in the current streams' order; nobody is
/// told that the weights were written.
void gather_weights(const std::vector<core::ShardedWeight>& weights, const ProcessGroup& group);

}  // namespace cairn::parallel
