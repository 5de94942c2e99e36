// Passes over a list of tensors in one launch: a table of pointers, cut into chunks of equal
// length, a block a chunk. Bound by memory.
//
// The check is deterministic: a chunk's sum is a tree of fixed shape, chunks are added in order per
// tensor, tensors in order in all.
#pragma once

#include "cairn/kernels/multi_tensor.h"
#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/table.h"

namespace cairn::kernels::cuda {

struct CheckPart {
  double squares;
  std::int64_t nonfinite;
  std::int64_t nan;

  __device__ void see(double value) {
    if (value - value == 0.0) {  // false for inf and NaN
      squares += value * value;
    } else {
      ++nonfinite;
      nan += value != value;
    }
  }
};
struct AddParts {
  __device__ CheckPart operator()(CheckPart a, CheckPart b) const {
    return {a.squares + b.squares, a.nonfinite + b.nonfinite, a.nan + b.nan};
  }
};

static __global__ void check_chunks_kernel(Table table, CheckPart* parts) {
  const Slot& slot = table.slots[table.chunk_slot[blockIdx.x]];
  const AnyFloat gradient = AnyFloat(slot.data[0], slot.dtype[0]);
  const std::int64_t chunk = blockIdx.x - table.first_chunk[table.chunk_slot[blockIdx.x]];
  const std::int64_t begin = chunk * kChunk, end = smaller(begin + kChunk, slot.count);
  CheckPart part{0.0, 0, 0};
  for (std::int64_t i = begin + threadIdx.x * kLanes; i < end; i += blockDim.x * kLanes) {
    if (i + kLanes <= end) {
      const auto pack = load_pack_or<kLanes>(gradient, i, 0.0f);
      SIMT_UNROLL
      for (int k = 0; k < kLanes; ++k) part.see(static_cast<double>(pack[k]));
    } else {
      for (std::int64_t k = i; k < end; ++k) part.see(gradient.load<double>(k));
    }
  }
  part = block_reduce(part, AddParts{}, CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) parts[blockIdx.x] = part;
}

/// A warp a tensor: lane k adds every 32nd chunk from k on.
static __global__ void check_tensors_kernel(Table table, const CheckPart* parts,
                                            CheckPart* totals) {
  const std::int32_t slot = static_cast<std::int32_t>(blockIdx.x);
  CheckPart total{0.0, 0, 0};
  for (std::int32_t k = table.first_chunk[slot] + static_cast<std::int32_t>(threadIdx.x);
       k < table.first_chunk[slot + 1]; k += static_cast<std::int32_t>(blockDim.x)) {
    total = AddParts{}(total, parts[k]);
  }
  total = block_reduce(total, AddParts{}, CheckPart{0.0, 0, 0});
  if (threadIdx.x == 0) totals[slot] = total;
}

/// What the host reads.
struct CheckResult {
  double squared_norm;
  std::int64_t first_nonfinite, nan, nonfinite_count;
};

struct Smallest {
  __device__ std::int64_t operator()(std::int64_t a, std::int64_t b) const { return smaller(a, b); }
};

/// One block. norms [slots] may be nullptr.
static __global__ void check_total_kernel(std::int32_t slots, const CheckPart* totals,
                                          CheckResult* result, double* norms) {
  double squares = 0.0;
  std::int64_t first = slots;
  for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x); k < slots;
       k += static_cast<std::int32_t>(blockDim.x)) {
    squares += totals[k].squares;
    if (norms != nullptr) norms[k] = totals[k].squares;
    if (totals[k].nonfinite > 0) first = smaller(first, k);
  }
  squares = block_sum(squares);
  first = block_reduce(first, Smallest{}, std::int64_t{slots});
  if (threadIdx.x != 0) return;
  const bool found = first < slots;
  *result = {squares, found ? first : -1, found ? totals[first].nan : 0,
             found ? totals[first].nonfinite : 0};
}

}  // namespace cairn::kernels::cuda
