// Buffers of a DistributedDataParallel: rank 0's on every rank, at a forward or when asked for.
#include "cairn/parallel/flatten.h"
#include "ddp/ddp.h"

namespace cairn::parallel {

void DistributedDataParallel::Impl::forward_begins(const Tensor& x) {
  follow_model(false);
  if (group.world_size() == 1 || !no_sync.reduces() || !model->training()) return;
  first_batch.see(x);
  if (!options.broadcast_buffers || buffers.empty()) return;
  if (uneven_inputs) uneven_inputs->announce(UnevenInputs::Next::forward, group);
  sync_buffers(0);
}

void DistributedDataParallel::Impl::sync_buffers(int root) {
  if (group.world_size() == 1) return;
  broadcast_parameters(model->buffers(), group, root);
  group.wait();
}

/// A rank without batches takes part in the others' forwards until they begin a backward.
bool DistributedDataParallel::Impl::other_ranks_have_batches() {
  if (group.world_size() == 1 || uneven_inputs->over()) return false;
  while (true) {
    follow_model(false);
    const UnevenInputs::Others others = uneven_inputs->next_of_others(group);
    if (others.next != UnevenInputs::Next::forward) return !uneven_inputs->over();
    sync_buffers(others.first);
  }
}

}  // namespace cairn::parallel
