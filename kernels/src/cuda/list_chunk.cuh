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

/// What the chunks of a slot add up to, by a warp whose lanes all add them in their order: they
/// load 32 at a time, ahead. `none` is what is missing of the last 32, and changes no sum.
template <class Part, class Join>
__device__ Part joined_chunks(const Table& table, std::int32_t slot, const Part* parts, Join join,
                              Part none) {
  SIMT_SHARED(Part, loaded, 32);
  const std::int32_t end = table.first_chunk[slot + 1];
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  const auto part_at = [&](std::int32_t k) { return k < end ? parts[k] : none; };
  Part total = none, next = part_at(table.first_chunk[slot] + lane);
  for (std::int32_t k = table.first_chunk[slot]; k < end; k += 32) {
    loaded[lane] = next;
    __syncthreads();
    next = part_at(k + 32 + lane);
    SIMT_UNROLL
    for (int j = 0; j < 32; ++j) total = join(total, loaded[j]);
    __syncthreads();
  }
  return total;
}

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
