// Two sums down each column of a row-major [M, C] matrix, of what Terms makes of its elements:
// parameter gradients and statistics. A block takes 128 bytes of a range of rows: 8 threads along a
// row, each with 16 bytes of it, and 32 lines. The ranges' parts are added in order by whoever
// needs the totals.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/launch.cuh"

namespace cairn::kernels::cuda {

inline constexpr int kRowThreads = 8, kRowLines = 32;  // of a block

struct ColumnSplit {
  std::int64_t rows, columns, rows_per_split;
  int tile, splits;  // columns of a block, ranges of rows

  /// Depends on the shape and the dtype alone, so that sums are the same bits everywhere.
  static ColumnSplit of(std::int64_t rows, std::int64_t columns, DType dtype) {
    const int tile = kRowThreads * 16 / static_cast<int>(core::size_of(dtype));
    const std::int64_t tiles = std::max<std::int64_t>(ceil_div(columns, tile), 1);
    const std::int64_t wanted = std::max<std::int64_t>(512 / tiles, 1);
    const std::int64_t most = std::max<std::int64_t>(rows / 64, 1);
    const std::int64_t length = std::max<std::int64_t>(ceil_div(rows, std::min(wanted, most)), 1);
    return {rows, columns, length, tile,
            static_cast<int>(std::max<std::int64_t>(ceil_div(rows, length), 1))};
  }
  std::int64_t blocks() const { return ceil_div(columns, tile) * splits; }
  std::int64_t partials() const { return 2 * columns * splits; }
};

/// What a block adds up: its tile of columns, and a range of rows.
struct ColumnTile {
  std::int64_t part, column, begin, end;

  __device__ explicit ColumnTile(const ColumnSplit& split)
      : part(blockIdx.x % static_cast<unsigned>(split.splits)),
        column(std::int64_t{blockIdx.x / static_cast<unsigned>(split.splits)} * split.tile),
        begin(part * split.rows_per_split),
        end(smaller(begin + split.rows_per_split, split.rows)) {}
};

/// Adds the warps' sums [N * kRowThreads columns] of a block; the first warp's first threads return
/// those of column threadIdx.x of the tile.
template <int N, class Op, class A>
__device__ A join_lines(Packed<A, N>& sums, bool packs, Op op) {
  constexpr int kTile = N * kRowThreads, kWarps = kRowThreads * kRowLines / 32;
  static_assert(kTile <= kRowThreads * kRowLines);
  SIMT_SHARED(A, lines, kWarps * kTile);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, x = lane % kRowThreads;
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) {
    sums[k] = op(sums[k], shuffle_xor(sums[k], 8));
    sums[k] = op(sums[k], shuffle_xor(sums[k], 16));
    const int column = packs ? x * N + k : k * kRowThreads + x;
    if (lane < kRowThreads) lines[thread / 32 * kTile + column] = sums[k];
  }
  __syncthreads();
  A total = lines[thread % kTile];
  for (int warp = 1; warp < kWarps; ++warp) total = op(total, lines[warp * kTile + thread % kTile]);
  __syncthreads();
  return total;
}

/// partial [splits, 2, columns]. Terms: value(constants, row, column) of one element, and
/// add(constants, row, column, sums) of kWidth adjacent ones, where rows are whole packs; each with
/// what it looked up for its columns before.
template <class A, class Terms>
__global__ void column_sums_kernel(ColumnSplit split, bool packs, Terms terms, A* partial) {
  constexpr int N = Terms::kWidth;
  const ColumnTile tile(split);
  const int x = static_cast<int>(threadIdx.x) % kRowThreads;
  const std::int64_t begin = tile.begin + static_cast<int>(threadIdx.x) / kRowThreads;
  Packed<Two<A>, N> sums{};
  if (!packs) {
    for (int k = 0; k < N; ++k) {
      const std::int64_t column = tile.column + k * kRowThreads + x;
      for (std::int64_t row = begin; column < split.columns && row < tile.end; row += kRowLines) {
        sums[k] = sums[k] + terms.value(row, column);
      }
    }
  } else if (tile.column + x * N < split.columns) {
    const std::int64_t column = tile.column + x * N;
    const auto constants = terms.constants(column);
    for (std::int64_t row = begin; row < tile.end; row += kRowLines) {
      terms.add(constants, row, column, sums);
    }
  }
  const Two<A> total = join_lines(sums, packs, Sum{});
  const std::int64_t column = tile.column + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= split.tile || column >= split.columns) return;
  partial[(2 * tile.part) * split.columns + column] = total.first;
  partial[(2 * tile.part + 1) * split.columns + column] = total.second;
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

/// packs: rows are whole packs, and aligned.
template <class A, class Terms>
Buffer<A> column_sums(const Queue& queue, const ColumnSplit& split, bool packs, Terms terms) {
  const Buffer<A> partial(queue, split.partials());
  launch(queue, {split.blocks(), kRowThreads * kRowLines}, column_sums_kernel<A, Terms>, split,
         packs && split.columns % Terms::kWidth == 0, terms, partial.data());
  return partial;
}

}  // namespace cairn::kernels::cuda
