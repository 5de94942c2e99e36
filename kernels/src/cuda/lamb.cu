#include "cuda/lamb.cuh"

#include "cuda/launch.cuh"
#include "cuda/optimizer_list.cuh"

namespace cairn::kernels::cuda {

void update_lamb(const UpdateList& list, const LambOptions& options) {
  const Queue queue(LambOptions::kName, list.device);
  const DeviceTable kept(queue, slots_of(list));
  const Table table = kept.table();
  if (table.chunk_count == 0) return;
  const DeviceScalars scalars(queue, list, options);
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

}  // namespace cairn::kernels::cuda
