// Table lookup. The backward sorts the rows of dy by token, rows of one token in their order, and
// adds each token's rows in that order: the bits do not depend on the schedule. The sort is a
// stable radix sort, 8 bits a pass: no token costs more than another, however often it occurs.
#pragma once

#include <limits>

#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

/// packs: rows are whole packs, and aligned.
template <class T>
__global__ void embedding_kernel(std::int64_t rows, std::int64_t columns, bool packs,
                                 std::int64_t vocabulary, const T* weight,
                                 const std::int64_t* index, std::int64_t index_stride, T* y) {
  constexpr int N = pack_width<T>;
  const T unknown = narrow<T>(std::numeric_limits<Arithmetic<T>>::quiet_NaN());
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t v = index[row * index_stride];
    const bool known = v >= 0 && v < vocabulary;
    const T* const from = weight + (known ? v : 0) * columns;
    T* const to = y + row * columns;
    visit_row<N>(
        columns, packs ? 0 : columns, [&](std::int64_t i) { to[i] = known ? from[i] : unknown; },
        [&](std::int64_t i) {
          auto pack = load_pack<N>(from + i);
          SIMT_UNROLL
          for (int k = 0; k < N; ++k) pack[k] = known ? pack[k] : unknown;
          store_pack<N>(to + i, pack);
        });
  }
}

/// The token of each row; unknown ones come last.
struct Tokens {
  std::int64_t rows, vocabulary;
  const std::int64_t* index;
  std::int64_t index_stride;

  __device__ std::int64_t of(std::int64_t row) const {
    const std::int64_t v = index[row * index_stride];
    return v >= 0 && v < vocabulary ? v : vocabulary;
  }
};

/// Moves rows from one order to the next, by 8 bits of their tokens. A warp takes a tile of rows.
struct SortPass {
  static constexpr int kDigits = 256, kTile = 1024;
  Tokens tokens;
  int shift;
  const std::int32_t* from;  // [rows]; nullptr: 0, 1, 2 ...
  std::int32_t* to;          // [rows]
  std::int32_t* counts;      // [kDigits, tiles], then the first place of each

  __device__ __host__ std::int64_t tiles() const { return (tokens.rows + kTile - 1) / kTile; }
  __device__ std::int64_t row(std::int64_t place) const {
    return from != nullptr ? from[place] : place;
  }
  __device__ int digit(std::int64_t row) const {
    return static_cast<int>(tokens.of(row) >> shift) & (kDigits - 1);
  }
};

static __global__ void count_digits_kernel(SortPass pass) {
  SIMT_SHARED(std::int32_t, counts, SortPass::kDigits);
  for (unsigned k = threadIdx.x; k < SortPass::kDigits; k += blockDim.x) counts[k] = 0;
  __syncthreads();
  const std::int64_t begin = std::int64_t{blockIdx.x} * SortPass::kTile;
  const std::int64_t end = smaller(begin + SortPass::kTile, pass.tokens.rows);
  for (std::int64_t place = begin + threadIdx.x; place < end; place += blockDim.x) {
    atomicAdd(&counts[pass.digit(pass.row(place))], 1);
  }
  __syncthreads();
  for (unsigned k = threadIdx.x; k < SortPass::kDigits; k += blockDim.x) {
    pass.counts[k * pass.tiles() + blockIdx.x] = counts[k];
  }
}

/// Each value becomes the sum of those before it; by one block, a value a thread and round.
static __global__ void exclusive_scan_kernel(std::int64_t n, std::int32_t* values) {
  SIMT_SHARED(std::int32_t, warps, 32);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  std::int32_t before = 0;
  for (std::int64_t first = 0; first < n; first += blockDim.x) {
    const std::int64_t i = first + threadIdx.x;
    const std::int32_t value = i < n ? values[i] : 0;
    std::int32_t sum = value;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    std::int32_t earlier = before, total = 0;
    for (int k = 0; k < static_cast<int>(blockDim.x / 32); ++k) {
      if (k < warp) earlier += warps[k];
      total += warps[k];
    }
    if (i < n) values[i] = earlier + sum - value;
    before += total;
    __syncthreads();
  }
}

/// Lanes of the warp whose digit is this lane's.
__device__ inline unsigned lanes_alike(int digit, bool present) {
  unsigned alike = __ballot_sync(0xffffffffu, present);
  for (int bit = 1; bit < SortPass::kDigits; bit *= 2) {
    const unsigned set = __ballot_sync(0xffffffffu, (digit & bit) != 0);
    alike &= (digit & bit) != 0 ? set : ~set;
  }
  return alike;
}
__device__ inline int count_bits(unsigned bits) {
  int count = 0;
  for (; bits != 0; bits &= bits - 1) ++count;
  return count;
}

/// Rounds of 32 rows in order; within a round, lanes of one digit in order.
static __global__ void scatter_kernel(SortPass pass) {
  SIMT_SHARED(std::int32_t, next, SortPass::kDigits);
  const int lane = static_cast<int>(threadIdx.x);
  for (int k = lane; k < SortPass::kDigits; k += 32) {
    next[k] = pass.counts[k * pass.tiles() + blockIdx.x];
  }
  __syncthreads();
  const std::int64_t begin = std::int64_t{blockIdx.x} * SortPass::kTile;
  const std::int64_t end = smaller(begin + SortPass::kTile, pass.tokens.rows);
  for (std::int64_t first = begin; first < end; first += 32) {
    const bool present = first + lane < end;
    const std::int64_t row = present ? pass.row(first + lane) : 0;
    const int digit = present ? pass.digit(row) : 0;
    const unsigned alike = lanes_alike(digit, present);
    const int rank = count_bits(alike & ((1u << lane) - 1));
    if (present) pass.to[next[digit] + rank] = static_cast<std::int32_t>(row);
    __syncwarp();
    if (present && rank == 0) next[digit] += count_bits(alike);
    __syncwarp();
  }
}

/// start[v]: the first place whose token is v or more, for v in [0, vocabulary].
static __global__ void group_starts_kernel(Tokens tokens, const std::int32_t* order,
                                           std::int32_t* start) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t v = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; v <= tokens.vocabulary;
       v += step) {
    std::int64_t low = 0, high = tokens.rows;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      const bool before = tokens.of(order[middle]) < v;
      low = before ? middle + 1 : low;
      high = before ? high : middle;
    }
    start[v] = static_cast<std::int32_t>(low);
  }
}

/// A block a row of dweight. packs: rows are whole packs, and aligned.
template <class T, class W>
__global__ void embedding_backward_kernel(std::int64_t vocabulary, std::int64_t columns, bool packs,
                                          const std::int32_t* start, const std::int32_t* order,
                                          const T* dy, W* dweight, bool accumulate) {
  using A = Arithmetic<T>;
  constexpr int N = pack_width<T, W>;
  for (std::int64_t v = blockIdx.x; v < vocabulary; v += gridDim.x) {
    const std::int32_t begin = start[v], end = start[v + 1];
    if (accumulate && begin == end) continue;
    W* const to = dweight + v * columns;
    visit_row<N>(
        columns, packs ? 0 : columns,
        [&](std::int64_t i) {
          A sum = accumulate ? static_cast<A>(widen(to[i])) : A(0);
          for (std::int32_t k = begin; k < end; ++k) {
            sum += widen(dy[std::int64_t{order[k]} * columns + i]);
          }
          to[i] = narrow<W>(sum);
        },
        [&](std::int64_t i) {
          auto sum = pack_or<N>(accumulate ? to : nullptr, i, A(0));
          for (std::int32_t k = begin; k < end; ++k) {
            const auto row = load_pack<N>(dy + std::int64_t{order[k]} * columns + i);
            SIMT_UNROLL
            for (int j = 0; j < N; ++j) sum[j] += widen(row[j]);
          }
          store_pack<N>(to + i, narrowed<W>(sum));
        });
  }
}

}  // namespace cairn::kernels::cuda
