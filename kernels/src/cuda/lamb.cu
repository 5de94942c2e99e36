#include "cuda/lamb.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/optimizer_list.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void CudaBackend::lamb_update(const std::vector<UpdateEntry>& entries,
                              const LambOptions& options) const {
  const Queue queue("lamb_update", entries.front().weight.device);
  const DeviceTable kept(queue, slots_of(entries));
  const Table table = kept.table();
  if (table.chunk_count == 0) return;
  const DeviceScalars scalars(queue, entries, options);
  const Buffer<LambNorms> parts(queue, table.chunk_count);
  const Buffer<float> steps(queue, table.slot_count);
  const math::Lamb<float> lamb(options);
  const bool adaptive = options.use_nvlamb || options.weight_decay != 0.0;
  launch(queue, {table.chunk_count, kThreads}, lamb_moments_kernel, table, scalars.list(), lamb,
         parts.data());
  launch(queue, {table.slot_count, 32}, lamb_steps_kernel, table, parts.data(), options.lr,
         adaptive, steps.data());
  launch(queue, {table.chunk_count, kThreads}, lamb_weights_kernel, table, lamb, steps.data());
}

}  // namespace cairn::kernels
