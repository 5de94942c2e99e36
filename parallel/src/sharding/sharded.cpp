#include "cairn/parallel/sharded.h"

#include <utility>

#include "cairn/core/error.h"
#include "ddp/ddp.h"
#include "sharding/gather_weights.h"

namespace cairn::parallel {

ShardedDataParallel::ShardedDataParallel(nn::Module& model, ProcessGroup group,
                                         const ShardedOptions& options)
    : DistributedDataParallel(model, std::move(group), options.distributed), stage_(options.stage) {
  impl_->shards_updates = true;
}

core::GradientReducer::Sharding DistributedDataParallel::Impl::sharding() const {
  if (!shards_updates) return {};
  return {group.rank(), group.world_size()};
}

void DistributedDataParallel::Impl::gather_weights(
    const std::vector<core::ShardedWeight>& weights) {
  parallel::gather_weights(weights, group);
}

void DistributedDataParallel::Impl::update_failed(const std::string& why) {
  if (shards_updates) group.abort(core::str("its update failed: ", why));
}

}  // namespace cairn::parallel
