#include "cuda/multi_tensor.cuh"

#include <cstring>

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/table.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

GradientCheck CudaBackend::check_gradients(const std::vector<TensorView>& gradients,
                                           bool per_tensor_norms) const {
  GradientCheck check;
  if (gradients.empty()) return check;
  const Queue queue("check_gradients", gradients.front().device);
  std::vector<Slot> slots;
  for (const TensorView& gradient : gradients) slots.push_back(slot_of({gradient}));
  const DeviceTable kept(queue, slots);
  const Table table = kept.table();
  const std::size_t count = slots.size(), norms = per_tensor_norms ? count : 0;

  const Buffer<CheckPart> parts(queue, table.chunk_count), totals(queue, table.slot_count);
  const auto result = queue.workspace(sizeof(CheckResult) + norms * sizeof(double));
  auto* const summary = static_cast<CheckResult*>(result->data());
  auto* const norm_data = norms == 0 ? nullptr : reinterpret_cast<double*>(summary + 1);
  if (table.chunk_count > 0) {
    launch(queue, {table.chunk_count, kThreads}, check_chunks_kernel, table, parts.data());
  }
  launch(queue, {table.slot_count, 32}, check_tensors_kernel, table, parts.data(), totals.data());
  launch(queue, {1, 1024}, check_total_kernel, table.slot_count, totals.data(), summary, norm_data);

  std::vector<double> host((sizeof(CheckResult)) / sizeof(double) + norms);
  queue.download(host.data(), result->data(), host.size() * sizeof(double));
  CheckResult found;
  std::memcpy(&found, host.data(), sizeof(found));
  check.squared_norm = found.squared_norm;
  check.first_nonfinite = found.first_nonfinite;
  check.is_nan = found.nan > 0;
  check.nonfinite_count = found.nonfinite_count;
  check.squared_norms.assign(host.end() - static_cast<std::ptrdiff_t>(norms), host.end());
  return check;
}

}  // namespace cairn::kernels
