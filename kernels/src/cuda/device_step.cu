#include "cuda/device_step.cuh"

#include <variant>

#include "cuda/cuda_backend.h"
#include "cuda/lamb.cuh"
#include "cuda/launch.cuh"
#include "cuda/optimizer_list.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

template <class Options>
RuleOnDevice<Options> rule_of(const UpdateList& list, const Options& options,
                              const DeviceStep& device) {
  const UpdateItem& item = list.items.front();
  return {options, StepState(device), item.gradient_factor, item.l2 + options.l2()};
}

template <class Options>
void update_by(const UpdateList& list, const Options& options, const DeviceStep& device) {
  const Queue queue(Options::kName, list.device);
  const DeviceTable table(queue, slots_of(list));
  if (table.table().chunk_count == 0) return;
  launch(queue, {table.table().chunk_count, kThreads}, update_device_kernel<Options>, table.table(),
         rule_of(list, options, device));
}
void update_by(const UpdateList& list, const LambOptions& options, const DeviceStep& device) {
  update_lamb(Queue(LambOptions::kName, list.device), list, options,
              rule_of(list, options, device));
}
void update_by(const UpdateList&, const NovoGradOptions&, const DeviceStep&) {}  // refused before

}  // namespace

void cuda::update_on_device(const UpdateList& list, const UpdateRule& rule,
                            const DeviceStep& device) {
  std::visit([&](const auto& options) { update_by(list, options, device); }, rule);
}

void CudaBackend::advance_step(View step, View found_inf) const {
  const Queue queue("advance_step", step.device);
  launch(queue, {1, 32}, advance_step_kernel, step.as<std::int32_t>(), found_inf.as<const float>());
}

void CudaBackend::find_nonfinite(const std::vector<TensorView>& tensors,
                                 const FoundNonfinite& found) const {
  const Queue queue("find_nonfinite", found.found_inf.device);
  const FoundState state(found);
  if (found.clip.defined()) {  // needs the norms as well
    const auto count = std::ssize(tensors);
    const Buffer<TensorCheck> checks(queue, count);
    if (count > 0) check_tensors(tensors, 2.0, checks.data());
    launch(queue, {1, 32}, judge_kernel, state, static_cast<const TensorCheck*>(checks.data()),
           count);
    return;
  }
  std::vector<Slot> slots;
  for (const TensorView& tensor : tensors) slots.push_back(slot_of({tensor}));
  launch(queue, {1, 32}, clear_flag_kernel, state.found_inf);
  const DeviceTable table(queue, slots);
  if (table.table().chunk_count == 0) return;
  launch(queue, {table.table().chunk_count, kThreads}, find_nonfinite_kernel, table.table(),
         state.found_inf, state.each);
}

}  // namespace cairn::kernels
