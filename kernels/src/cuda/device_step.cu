#include "cuda/device_step.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/optimizer_list.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void cuda::update_on_device(const UpdateList& list, const AdamOptions& options) {
  const Queue queue(AdamOptions::kName, list.device);
  const StepState state(options.device);
  launch(queue, {1, 32}, advance_step_kernel, state);
  const DeviceTable table(queue, slots_of(list));
  if (table.table().chunk_count == 0) return;
  launch(queue, {table.table().chunk_count, kThreads}, adam_device_kernel, table.table(),
         scalars_of(list.items.front(), options), AdamNumbers(options), state);
}

void CudaBackend::find_nonfinite(const std::vector<TensorView>& tensors, View found_inf) const {
  const Queue queue("find_nonfinite", found_inf.device);
  std::vector<Slot> slots;
  for (const TensorView& tensor : tensors) slots.push_back(slot_of({tensor}));
  float* const flag = found_inf.as<float>();
  launch(queue, {1, 32}, clear_flag_kernel, flag);
  const DeviceTable table(queue, slots);
  if (table.table().chunk_count == 0) return;
  launch(queue, {table.table().chunk_count, kThreads}, find_nonfinite_kernel, table.table(), flag);
}

}  // namespace cairn::kernels
