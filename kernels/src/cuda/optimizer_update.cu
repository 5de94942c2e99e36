#include "cuda/optimizer_update.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/table.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

template <class Rule>
void update(const char* op, const std::vector<UpdateEntry>& entries, const Rule& rule) {
  if (entries.empty()) return;
  const Queue queue(op, entries.front().weight.device);
  std::vector<Slot> slots;
  for (const UpdateEntry& entry : entries) {
    slots.push_back(
        slot_of({entry.gradient, entry.weight, entry.master, entry.moment1, entry.moment2}));
  }
  const DeviceTable table(queue, slots);
  if (table.table().chunk_count == 0) return;
  launch(queue, {table.table().chunk_count, kThreads}, update_kernel<Rule>, table.table(), rule);
}

}  // namespace

void CudaBackend::adam_update(const std::vector<UpdateEntry>& entries,
                              const AdamOptions& options) const {
  update("adam_update", entries, AdamRule{math::Adam<float>(options)});
}

void CudaBackend::sgd_update(const std::vector<UpdateEntry>& entries,
                             const SgdOptions& options) const {
  update("sgd_update", entries, SgdRule{math::Sgd<float>(options), options.momentum != 0.0});
}

}  // namespace cairn::kernels
