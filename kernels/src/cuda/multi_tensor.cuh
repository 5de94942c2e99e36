// Passes over a list of tensors in one launch: a table of pointers, cut into chunks of equal
// length, a block a chunk. Bound by memory.
//
// A check's sums are those of multi_tensor.h, whatever the alignment of the memory: a warp adds a
// block up, then the blocks of a chunk and the chunks of a tensor follow each other.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/list_chunk.cuh"
#include "math/power_sum.h"

namespace cairn::kernels::cuda {

static_assert(kChunk == kSumChunk);

/// see(value) for the elements [begin, end) of view 0 that are this lane's: kLanes of each
/// 32 * kLanes. Those of a whole block are on their way together.
template <class See>
__device__ __forceinline__ void see_by_lanes(const Slot& slot, std::int64_t begin, std::int64_t end,
                                             See see) {
  constexpr std::int64_t kStep = 32 * kLanes;
  with_list_type(slot.dtype[0], [&](auto type) {
    const auto* const x = static_cast<const decltype(type)*>(slot.data[0]);
    const bool aligned = packs_aligned(x + begin);
    if (aligned && end - begin == kSumBlock) {
      constexpr int kPacks = static_cast<int>(kSumBlock / kStep);
      const auto* const mine = x + begin + threadIdx.x % 32 * kLanes;
      Packed<decltype(type), kLanes> packs[kPacks];
      SIMT_UNROLL
      for (int i = 0; i < kPacks; ++i) packs[i] = load_pack<kLanes>(mine + i * kStep);
      SIMT_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) see(static_cast<float>(widen(packs[i][k])));
      }
      return;
    }
    for (std::int64_t i = begin + threadIdx.x % 32 * kLanes; i < end; i += kStep) {
      if (aligned && i + kLanes <= end) {
        const auto pack = load_pack<kLanes>(x + i);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) see(static_cast<float>(widen(pack[k])));
      } else {
        for (std::int64_t k = i; k < smaller(i + kLanes, end); ++k)
          see(static_cast<float>(widen(x[k])));
      }
    }
  });
}

/// Power is PowerSum, or one of its kinds.
template <class Power>
__global__ void check_chunks_kernel(Table table, Power power, CheckPart* parts) {
  constexpr int kBlocks = static_cast<int>(kSumChunk / kSumBlock);
  SIMT_SHARED(CheckPart, sums, kBlocks);
  const BlockChunk chunk(table);
  const JoinParts<Power> join{power};
  for (int b = static_cast<int>(threadIdx.x / 32); b < kBlocks;
       b += static_cast<int>(blockDim.x / 32)) {
    const std::int64_t begin = chunk.begin + b * kSumBlock;
    CheckPart part{0.0, 0, 0};
    see_by_lanes(chunk.slot, begin, smaller(begin + kSumBlock, chunk.end),
                 [&](float x) { part.see(x, power); });
    part = warp_reduce(part, join);
    if (threadIdx.x % 32 == 0) sums[b] = part;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  CheckPart total{0.0, 0, 0};
  for (int b = 0; b < kBlocks; ++b) total = join(total, sums[b]);
  parts[blockIdx.x] = total;
}

/// out = a x + b y, or a x, and which arguments are checked.
struct Linear {
  float a, b;
  bool has_y, check_x, check_y;

  __device__ float operator()(float x, float y, CheckPart& part) const {
    if (check_x) part.see(x, Squares());
    if (check_y) part.see(y, Squares());
    return has_y ? math::fma(a, x, b * y) : a * x;
  }
};

/// A chunk whose x is X, and whose y (where there is one) and out are Y.
template <class X, class Y>
__device__ __forceinline__ void linear_chunk(const BlockChunk& chunk, const Linear& linear,
                                             CheckPart& part) {
  const X* const x = static_cast<const X*>(chunk.slot.data[0]) + chunk.begin;
  const Y* y = static_cast<const Y*>(chunk.slot.data[1]);
  if (y != nullptr) y += chunk.begin;
  Y* const out = static_cast<Y*>(chunk.slot.data[2]) + chunk.begin;
  const std::int64_t n = chunk.end - chunk.begin;
  visit_row<kLanes>(
      n, common_head(n, x, y, out),
      [&](std::int64_t i) {
        out[i] = narrow<Y>(linear(widen(x[i]), element_or(y, i, 0.0f), part));
      },
      [&](std::int64_t i) {
        auto pack = widened<float>(load_pack<kLanes>(x + i));
        const auto added = pack_or<kLanes>(y, i, 0.0f);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) pack[k] = linear(pack[k], added[k], part);
        store_pack<kLanes>(out + i, narrowed<Y>(pack));
      });
}

/// A y of another dtype than out.
__device__ inline void linear_chunk_any(const BlockChunk& chunk, const Linear& linear,
                                        CheckPart& part) {
  const AnyFloat x(chunk.slot.data[0], chunk.slot.dtype[0]);
  const AnyFloat y(chunk.slot.data[1], chunk.slot.dtype[1]);
  const AnyFloat out(chunk.slot.data[2], chunk.slot.dtype[2]);
  for (std::int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += blockDim.x) {
    out.store(i, linear(x.load<float>(i), y.load<float>(i), part));
  }
}

static __global__ void linear_chunks_kernel(Table table, Linear linear, CheckPart* parts) {
  const BlockChunk chunk(table);
  CheckPart part{0.0, 0, 0};
  if (linear.has_y && chunk.slot.dtype[1] != chunk.slot.dtype[2]) {
    linear_chunk_any(chunk, linear, part);
  } else {
    with_list_type(chunk.slot.dtype[0], [&](auto x) {
      with_list_type(chunk.slot.dtype[2],
                     [&](auto y) { linear_chunk<decltype(x), decltype(y)>(chunk, linear, part); });
    });
  }
  part = block_reduce(part, JoinParts<Squares>(), CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) parts[blockIdx.x] = part;
}

/// A warp a tensor.
static __global__ void join_chunks_kernel(Table table, const CheckPart* parts, PowerSum power,
                                          CheckPart* checks) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x);
  const CheckPart total =
      joined_chunks(table, slot, parts, JoinParts<PowerSum>{power}, CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) checks[slot] = total;
}

}  // namespace cairn::kernels::cuda
