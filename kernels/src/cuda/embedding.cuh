// Table lookup. The backward groups the rows of dy by index (count, scan, fill, order within the
// group) and then sums each group in the order of its rows: the bits do not depend on the schedule,
// though counting and filling use atomics. Ordering compares within a group only: N reads a row at
// worst, when all indices are equal.
#pragma once

#include <limits>

#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"

namespace cairn::kernels::cuda {

template <class T>
__global__ void embedding_kernel(std::int64_t rows, std::int64_t columns, std::int64_t vocabulary,
                                 const T* weight, const std::int64_t* index,
                                 std::int64_t index_stride, T* y) {
  using A = Arithmetic<T>;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t v = index[row * index_stride];
    const bool known = v >= 0 && v < vocabulary;
    for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      y[row * columns + i] =
          known ? weight[v * columns + i] : narrow<T>(std::numeric_limits<A>::quiet_NaN());
    }
  }
}

/// The groups under construction. Rows whose index is out of range belong to none.
struct RowGroups {
  std::int64_t rows, vocabulary;
  const std::int64_t* index;
  std::int64_t index_stride;
  std::int32_t* start;   // [V + 1] first slot of each group; while counting: the counts
  std::int32_t* filled;  // [V] slots taken so far
  std::int32_t* slots;   // [N] rows, group by group, in any order within a group
  std::int32_t* order;   // [N] the same, ascending within a group

  __device__ std::int64_t group(std::int64_t row) const {
    const std::int64_t v = index[row * index_stride];
    return v >= 0 && v < vocabulary ? v : -1;
  }
};

static __global__ void clear_groups_kernel(RowGroups groups) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t v = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; v <= groups.vocabulary;
       v += step) {
    groups.start[v] = 0;
    if (v < groups.vocabulary) groups.filled[v] = 0;
  }
}

static __global__ void count_groups_kernel(RowGroups groups) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < groups.rows;
       row += step) {
    const std::int64_t v = groups.group(row);
    if (v >= 0) atomicAdd(&groups.start[v], 1);
  }
}

/// counts -> first slots, by one block: each round scans blockDim.x counts.
static __global__ void scan_groups_kernel(RowGroups groups) {
  SIMT_SHARED(std::int32_t, warps, 32);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  std::int32_t before = 0;
  for (std::int64_t first = 0; first <= groups.vocabulary; first += blockDim.x) {
    const std::int64_t v = first + threadIdx.x;
    const std::int32_t count = v < groups.vocabulary ? groups.start[v] : 0;
    std::int32_t sum = count;  // inclusive within the warp
    for (int d = 1; d < 32; d *= 2) {
      const std::int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    std::int32_t earlier = before, total = 0;
    for (int k = 0; k < static_cast<int>(blockDim.x / 32); ++k) {
      if (k < warp) earlier += warps[k];
      total += warps[k];
    }
    if (v <= groups.vocabulary) groups.start[v] = earlier + sum - count;
    before += total;
    __syncthreads();
  }
}

static __global__ void fill_groups_kernel(RowGroups groups) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < groups.rows;
       row += step) {
    const std::int64_t v = groups.group(row);
    if (v < 0) continue;
    const std::int32_t slot = groups.start[v] + atomicAdd(&groups.filled[v], 1);
    groups.slots[slot] = static_cast<std::int32_t>(row);
  }
}

static __global__ void order_groups_kernel(RowGroups groups) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t filled = groups.start[groups.vocabulary];
  for (std::int64_t slot = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; slot < filled;
       slot += step) {
    const std::int32_t row = groups.slots[slot];
    const std::int64_t v = groups.group(row);
    const std::int32_t begin = groups.start[v], end = groups.start[v + 1];
    std::int32_t smaller_rows = 0;
    for (std::int32_t k = begin; k < end; ++k) smaller_rows += groups.slots[k] < row;
    groups.order[begin + smaller_rows] = row;
  }
}

/// A block a row of dweight.
template <class T>
__global__ void embedding_backward_kernel(RowGroups groups, std::int64_t columns, const T* dy,
                                          AnyFloat dweight, bool accumulate) {
  using A = Arithmetic<T>;
  for (std::int64_t v = blockIdx.x; v < groups.vocabulary; v += gridDim.x) {
    const std::int32_t begin = groups.start[v], end = groups.start[v + 1];
    if (accumulate && begin == end) continue;
    for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      A sum = accumulate ? dweight.load<A>(v * columns + i) : A(0);
      for (std::int32_t k = begin; k < end; ++k) {
        sum += widen(dy[std::int64_t{groups.order[k]} * columns + i]);
      }
      dweight.store(v * columns + i, sum);
    }
  }
}

}  // namespace cairn::kernels::cuda
