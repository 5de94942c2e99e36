// A hash of each tensor of a list: a block a chunk of bytes, then a warp a tensor adds the chunks.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/table.h"
#include "math/word_hash.h"

namespace cairn::kernels::cuda {

/// The table's elements are bytes.
static __global__ void hash_chunks_kernel(Table table, std::uint64_t* parts) {
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const auto* const bytes = static_cast<const unsigned char*>(table.slots[index].data[0]);
  const std::int64_t begin = (blockIdx.x - std::int64_t{table.first_chunk[index]}) * kChunk;
  const std::int64_t end = smaller(begin + kChunk, table.slots[index].count);
  const std::int64_t whole = packs_aligned(bytes) ? end - (end - begin) % 16 : begin;
  std::uint64_t sum = 0;
  for (std::int64_t i = begin + threadIdx.x * 16; i < whole; i += blockDim.x * 16) {
    const Sixteen words = load_16(bytes + i);
    std::uint64_t both[2];
    memcpy(both, &words, 16);
    sum += WordHash::of(both[0], i / 8) + WordHash::of(both[1], i / 8 + 1);
  }
  for (std::int64_t i = whole + threadIdx.x * 8; i < end; i += blockDim.x * 8) {
    sum += WordHash::of(WordHash::load(bytes + i, smaller(8, end - i)), i / 8);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

static __global__ void join_hashes_kernel(Table table, const std::uint64_t* parts,
                                          std::uint64_t* hashes) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x);
  std::uint64_t sum = 0;
  for (std::int32_t k = table.first_chunk[slot] + static_cast<std::int32_t>(threadIdx.x);
       k < table.first_chunk[slot + 1]; k += static_cast<std::int32_t>(blockDim.x)) {
    sum += parts[k];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) hashes[slot] = WordHash::finish(sum, table.slots[slot].count);
}

}  // namespace cairn::kernels::cuda
