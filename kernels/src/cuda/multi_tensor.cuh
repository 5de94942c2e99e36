// Passes over a list of tensors in one launch: a table of pointers, cut into chunks of equal
// length, a block a chunk. Bound by memory.
//
// A check is deterministic: a chunk's sum is a tree of fixed shape, and so is the sum of a tensor's
// chunks.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/table.h"
#include "math/power_sum.h"

namespace cairn::kernels::cuda {

/// The chunk of the table that a block works on.
struct BlockChunk {
  const Slot& slot;
  std::int64_t begin, end;

  __device__ explicit BlockChunk(const Table& table)
      : slot(table.slots[table.chunk_slot[blockIdx.x]]),
        begin((blockIdx.x - std::int64_t{table.first_chunk[table.chunk_slot[blockIdx.x]]}) *
              kChunk),
        end(smaller(begin + kChunk, slot.count)) {}
};

static __global__ void check_chunks_kernel(Table table, PowerSum power, CheckPart* parts) {
  const BlockChunk chunk(table);
  const AnyFloat x(chunk.slot.data[0], chunk.slot.dtype[0]);
  CheckPart part{0.0, 0, 0};
  for (std::int64_t i = chunk.begin + threadIdx.x * kLanes; i < chunk.end;
       i += blockDim.x * kLanes) {
    if (i + kLanes <= chunk.end) {
      const auto pack = load_pack_or<kLanes>(x, i, 0.0f);
      SIMT_UNROLL
      for (int k = 0; k < kLanes; ++k) part.see(static_cast<double>(pack[k]), power);
    } else {
      for (std::int64_t k = i; k < chunk.end; ++k) part.see(x.load<double>(k), power);
    }
  }
  part = block_reduce(part, JoinParts{power}, CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) parts[blockIdx.x] = part;
}

/// out = a x + b y, or a x, and which arguments are checked.
struct Linear {
  float a, b;
  bool has_y, check_x, check_y;

  __device__ float operator()(float x, float y, CheckPart& part, const PowerSum& power) const {
    if (check_x) part.see(x, power);
    if (check_y) part.see(y, power);
    return has_y ? math::fma(a, x, b * y) : a * x;
  }
};

static __global__ void linear_chunks_kernel(Table table, Linear linear, PowerSum power,
                                            CheckPart* parts) {
  const BlockChunk chunk(table);
  const AnyFloat x(chunk.slot.data[0], chunk.slot.dtype[0]);
  const AnyFloat y(chunk.slot.data[1], chunk.slot.dtype[1]);
  const AnyFloat out(chunk.slot.data[2], chunk.slot.dtype[2]);
  CheckPart part{0.0, 0, 0};
  for (std::int64_t i = chunk.begin + threadIdx.x * kLanes; i < chunk.end;
       i += blockDim.x * kLanes) {
    if (i + kLanes <= chunk.end) {
      auto pack = load_pack_or<kLanes>(x, i, 0.0f);
      const auto added = load_pack_or<kLanes>(y, i, 0.0f);
      SIMT_UNROLL
      for (int k = 0; k < kLanes; ++k) pack[k] = linear(pack[k], added[k], part, power);
      store_pack_any<kLanes>(out, i, pack);
    } else {
      for (std::int64_t k = i; k < chunk.end; ++k) {
        out.store(k, linear(x.load<float>(k), y.load_or(k, 0.0f), part, power));
      }
    }
  }
  part = block_reduce(part, JoinParts{power}, CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) parts[blockIdx.x] = part;
}

/// A warp a tensor: lane k adds every 32nd chunk from k on.
static __global__ void join_chunks_kernel(Table table, const CheckPart* parts, PowerSum power,
                                          CheckPart* checks) {
  const std::int32_t slot = static_cast<std::int32_t>(blockIdx.x);
  const JoinParts join{power};
  CheckPart total{0.0, 0, 0};
  for (std::int32_t k = table.first_chunk[slot] + static_cast<std::int32_t>(threadIdx.x);
       k < table.first_chunk[slot + 1]; k += static_cast<std::int32_t>(blockDim.x)) {
    total = join(total, parts[k]);
  }
  total = block_reduce(total, join, CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) checks[slot] = total;
}

}  // namespace cairn::kernels::cuda
