#include "cairn/parallel/sharded.h"

#include <utility>

#include "cairn/core/error.h"
#include "ddp/ddp.h"
#include "sharding/gather_weights.h"

namespace cairn::parallel {

ShardedDataParallel::ShardedDataParallel(nn::Module& model, ProcessGroup group,
                                         const ShardedOptions& options)
    : DistributedDataParallel(model, std::move(group), options.distributed, options.stage),
      stage_(options.stage) {}

core::GradientReducer::Sharding DistributedDataParallel::Impl::sharding() const {
  if (!stage) return {};
  return {group.rank(), group.world_size(), shards_gradients()};
}

void DistributedDataParallel::Impl::gather_weights(
    const std::vector<core::ShardedWeight>& weights) {
  parallel::gather_weights(weights, group);
}

void DistributedDataParallel::Impl::update_failed(const std::string& why) {
  if (stage) group.abort(core::str("its update failed: ", why));
}

}  // namespace cairn::parallel
