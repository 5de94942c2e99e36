// Passes over a list of tensors in one launch: a table of pointers, cut into chunks of equal
// length, a block a chunk. Bound by memory.
//
// A check is deterministic: a chunk's sum is a tree of fixed shape, and so is the sum of a tensor's
// chunks.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/list_chunk.cuh"
#include "math/power_sum.h"

namespace cairn::kernels::cuda {

static __global__ void check_chunks_kernel(Table table, PowerSum power, CheckPart* parts) {
  CheckPart part{0.0, 0, 0};
  see_chunk(BlockChunk(table), [&](float x) { part.see(static_cast<double>(x), power); });
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

/// A chunk whose x is X, and whose y (where there is one) and out are Y.
template <class X, class Y>
__device__ __forceinline__ void linear_chunk(const BlockChunk& chunk, const Linear& linear,
                                             const PowerSum& power, CheckPart& part) {
  const X* const x = static_cast<const X*>(chunk.slot.data[0]) + chunk.begin;
  const Y* y = static_cast<const Y*>(chunk.slot.data[1]);
  if (y != nullptr) y += chunk.begin;
  Y* const out = static_cast<Y*>(chunk.slot.data[2]) + chunk.begin;
  const std::int64_t n = chunk.end - chunk.begin;
  visit_row<kLanes>(
      n, common_head(n, x, y, out),
      [&](std::int64_t i) {
        out[i] = narrow<Y>(linear(widen(x[i]), element_or(y, i, 0.0f), part, power));
      },
      [&](std::int64_t i) {
        auto pack = widened<float>(load_pack<kLanes>(x + i));
        const auto added = pack_or<kLanes>(y, i, 0.0f);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) pack[k] = linear(pack[k], added[k], part, power);
        store_pack<kLanes>(out + i, narrowed<Y>(pack));
      });
}

/// A y of another dtype than out.
__device__ inline void linear_chunk_any(const BlockChunk& chunk, const Linear& linear,
                                        const PowerSum& power, CheckPart& part) {
  const AnyFloat x(chunk.slot.data[0], chunk.slot.dtype[0]);
  const AnyFloat y(chunk.slot.data[1], chunk.slot.dtype[1]);
  const AnyFloat out(chunk.slot.data[2], chunk.slot.dtype[2]);
  for (std::int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += blockDim.x) {
    out.store(i, linear(x.load<float>(i), y.load<float>(i), part, power));
  }
}

static __global__ void linear_chunks_kernel(Table table, Linear linear, PowerSum power,
                                            CheckPart* parts) {
  const BlockChunk chunk(table);
  CheckPart part{0.0, 0, 0};
  if (linear.has_y && chunk.slot.dtype[1] != chunk.slot.dtype[2]) {
    linear_chunk_any(chunk, linear, power, part);
  } else {
    with_list_type(chunk.slot.dtype[0], [&](auto x) {
      with_list_type(chunk.slot.dtype[2], [&](auto y) {
        linear_chunk<decltype(x), decltype(y)>(chunk, linear, power, part);
      });
    });
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
