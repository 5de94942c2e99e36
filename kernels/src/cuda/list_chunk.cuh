// The chunk of a list of tensors that a block works on.
#pragma once

#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/table.h"

namespace cairn::kernels::cuda {

struct BlockChunk {
  const Slot& slot;
  std::int64_t begin, end;

  __device__ explicit BlockChunk(const Table& table)
      : slot(table.slots[table.chunk_slot[blockIdx.x]]),
        begin((blockIdx.x - std::int64_t{table.first_chunk[table.chunk_slot[blockIdx.x]]}) *
              kChunk),
        end(smaller(begin + kChunk, slot.count)) {}
};

/// The floating types of a list's tensors.
template <class F>
__device__ __forceinline__ void with_list_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

/// see(value) for each element of the chunk of view 0, by the threads of the block.
template <class See>
__device__ __forceinline__ void see_chunk(const BlockChunk& chunk, See see) {
  with_list_type(chunk.slot.dtype[0], [&](auto type) {
    const auto* const x = static_cast<const decltype(type)*>(chunk.slot.data[0]) + chunk.begin;
    const std::int64_t n = chunk.end - chunk.begin;
    visit_row<kLanes>(
        n, common_head(n, x), [&](std::int64_t i) { see(static_cast<float>(widen(x[i]))); },
        [&](std::int64_t i) {
          const auto pack = load_pack<kLanes>(x + i);
          SIMT_UNROLL
          for (int k = 0; k < kLanes; ++k) see(static_cast<float>(widen(pack[k])));
        });
  });
}

}  // namespace cairn::kernels::cuda
