// Two sums down each column of a row-major [M, C] matrix, of values that f(row, column) computes:
// parameter gradients and statistics. A block takes 32 columns x 8 lines of a range of rows; the
// ranges' parts are added in order by whoever needs the totals.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/launch.cuh"

namespace cairn::kernels::cuda {

template <class A>
struct Two {
  A first, second;
};

struct ColumnSplit {
  std::int64_t rows, columns, rows_per_split;
  int splits;

  /// Depends on the shape alone, so that sums are the same bits everywhere.
  static ColumnSplit of(std::int64_t rows, std::int64_t columns) {
    const std::int64_t tiles = std::max<std::int64_t>(ceil_div(columns, 32), 1);
    const std::int64_t wanted = std::max<std::int64_t>(512 / tiles, 1);
    const std::int64_t most = std::max<std::int64_t>(rows / 64, 1);
    const std::int64_t length = std::max<std::int64_t>(ceil_div(rows, std::min(wanted, most)), 1);
    return {rows, columns, length,
            static_cast<int>(std::max<std::int64_t>(ceil_div(rows, length), 1))};
  }
  std::int64_t blocks() const { return ceil_div(columns, 32) * splits; }
  std::int64_t partials() const { return 2 * columns * splits; }
};

/// partial [splits, 2, columns].
template <class A, class F>
__global__ void column_sums_kernel(ColumnSplit split, F f, A* partial) {
  constexpr int kTile = 32, kDepth = 8;
  SIMT_SHARED(Two<A>, lines, kTile * kDepth);
  const int x = static_cast<int>(threadIdx.x) % kTile, line = static_cast<int>(threadIdx.x) / kTile;
  const std::int64_t part = blockIdx.x % static_cast<unsigned>(split.splits);
  const std::int64_t column =
      blockIdx.x / static_cast<unsigned>(split.splits) * std::int64_t{kTile} + x;
  const std::int64_t begin = part * split.rows_per_split;
  const std::int64_t end = smaller(begin + split.rows_per_split, split.rows);
  Two<A> sum{A(0), A(0)};
  if (column < split.columns) {
    for (std::int64_t row = begin + line; row < end; row += kDepth) {
      const Two<A> value = f(row, column);
      sum.first += value.first, sum.second += value.second;
    }
  }
  lines[threadIdx.x] = sum;
  __syncthreads();
  if (line != 0 || column >= split.columns) return;
  for (int k = 1; k < kDepth; ++k) {
    sum.first += lines[k * kTile + x].first, sum.second += lines[k * kTile + x].second;
  }
  partial[(2 * part) * split.columns + column] = sum.first;
  partial[(2 * part + 1) * split.columns + column] = sum.second;
}

template <class A>
__device__ Two<A> column_total(const ColumnSplit& split, const A* partial, std::int64_t column) {
  Two<A> sum{A(0), A(0)};
  for (int part = 0; part < split.splits; ++part) {
    sum.first += partial[(2 * part) * split.columns + column];
    sum.second += partial[(2 * part + 1) * split.columns + column];
  }
  return sum;
}

template <class A, class F>
Buffer<A> column_sums(const Queue& queue, const ColumnSplit& split, F f) {
  const Buffer<A> partial(queue, split.partials());
  launch(queue, {split.blocks(), 256}, column_sums_kernel<A, F>, split, f, partial.data());
  return partial;
}

}  // namespace cairn::kernels::cuda
