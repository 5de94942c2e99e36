#include "cuda/multi_tensor.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/table.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

/// Adds up the chunks' parts per tensor.
void join_chunks(const Queue& queue, const Table& table, const Buffer<CheckPart>& parts,
                 const PowerSum& power, TensorCheck* checks) {
  launch(queue, {table.slot_count, 32}, join_chunks_kernel, table, parts.data(), power,
         reinterpret_cast<CheckPart*>(checks));
}

}  // namespace

void CudaBackend::check_tensors(const std::vector<TensorView>& tensors, double p,
                                TensorCheck* checks) const {
  const Queue queue("check_tensors", tensors.front().device);
  std::vector<Slot> slots;
  for (const TensorView& tensor : tensors) slots.push_back(slot_of({tensor}));
  const DeviceTable kept(queue, slots);
  const Table& table = kept.table();
  const Buffer<CheckPart> parts(queue, table.chunk_count);
  const PowerSum power(p);
  if (table.chunk_count > 0) {
    const Grid grid{table.chunk_count, kThreads};
    if (power.kind() == PowerSum::Kind::squares) {
      launch(queue, grid, check_chunks_kernel<Squares>, table, Squares(), parts.data());
    } else {
      launch(queue, grid, check_chunks_kernel<PowerSum>, table, power, parts.data());
    }
  }
  join_chunks(queue, table, parts, power, checks);
}

void CudaBackend::multi_tensor_linear(const LinearLists& lists, TensorCheck* checks) const {
  const Queue queue("multi_tensor_linear", lists.x.front().device);
  std::vector<Slot> slots;
  for (std::size_t i = 0; i < lists.x.size(); ++i) {
    const TensorView y = lists.y.empty() ? TensorView() : lists.y[i];
    slots.push_back(slot_of({lists.x[i], y, lists.out[i]}));
  }
  const DeviceTable kept(queue, slots);
  const Table& table = kept.table();
  const Buffer<CheckPart> parts(queue, table.chunk_count);
  const Linear linear{static_cast<float>(lists.a), static_cast<float>(lists.b), !lists.y.empty(),
                      lists.check_x, lists.check_y};
  const PowerSum squares(2.0);
  if (table.chunk_count > 0) {
    launch(queue, {table.chunk_count, kThreads}, linear_chunks_kernel, table, linear, parts.data());
  }
  join_chunks(queue, table, parts, squares, checks);
}

}  // namespace cairn::kernels
