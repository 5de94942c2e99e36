#include "cuda/hash_tensors.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void CudaBackend::hash_tensors(const std::vector<TensorView>& tensors,
                               std::uint64_t* hashes) const {
  static_assert(cuda::kChunk % 16 == 0);
  const Queue queue("hash_tensors", tensors.front().device);
  std::vector<Slot> slots;
  for (const TensorView& tensor : tensors) {
    const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
    slots.push_back(slot_of({TensorView(tensor.data, {bytes}, DType::u8, tensor.device)}));
  }
  const DeviceTable list(queue, slots, TableUse::once);
  const Table& table = list.table();
  const Buffer<std::uint64_t> parts(queue, table.chunk_count);
  if (table.chunk_count > 0) {
    launch(queue, {table.chunk_count, kThreads}, hash_chunks_kernel, table, parts.data());
  }
  launch(queue, {table.slot_count, 32}, join_hashes_kernel, table, parts.data(), hashes);
}

}  // namespace cairn::kernels
