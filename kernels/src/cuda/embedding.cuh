// Table lookup. The backward sorts the rows of dy by token, rows of one token in their order, and
// adds each token's rows in that order, long runs in pieces: no schedule changes the bits.
// The sort is a stable radix sort, 8 bits a pass. No token costs more than another, however often
// it occurs.
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

/// The rows of dy by token.
struct TokenRuns {
  /// A run of more rows is added in pieces of so many, by a block each.
  static constexpr std::int64_t kPiece = 64;

  Tokens tokens;
  const std::int32_t* start;  // [vocabulary + 1], in order
  const std::int32_t* order;  // [rows]

  __device__ __host__ std::int64_t slots() const {
    return tokens.rows > kPiece ? 2 * ((tokens.rows + kPiece - 1) / kPiece) : 0;
  }
  /// Where a piece's sum goes. Among kPiece places of the order at most one piece begins of a run
  /// that began before them, and one of a run that begins there.
  __device__ static std::int64_t slot(std::int64_t place, bool first) {
    return 2 * (place / kPiece) + (first ? 1 : 0);
  }
};

/// Places in the order.
struct Piece {
  std::int64_t begin = 0, end = 0;
};

/// The piece whose sum goes to the slot; an empty one where there is none.
__device__ inline Piece piece_of(const TokenRuns& runs, std::int64_t slot) {
  constexpr std::int64_t kPiece = TokenRuns::kPiece;
  const bool first = slot % 2 == 1;
  const std::int64_t from = slot / 2 * kPiece;
  const std::int64_t inside = first ? from + kPiece - 1 : from;  // a place of the run
  if (inside >= runs.tokens.rows) return {};
  const std::int64_t token = runs.tokens.of(runs.order[inside]);
  if (token == runs.tokens.vocabulary) return {};
  const std::int64_t begin = runs.start[token], end = runs.start[token + 1];
  if (end - begin <= kPiece || first != (begin >= from)) return {};
  const std::int64_t before = first ? 0 : (from - begin + kPiece - 1) / kPiece;
  const std::int64_t place = begin + before * kPiece;
  return {place, smaller(place + kPiece, end)};
}

/// Adds rows of dy.
template <class T>
struct RowSums {
  using A = Arithmetic<T>;
  const std::int32_t* order;
  const T* dy;
  std::int64_t columns;

  __device__ A one(std::int64_t begin, std::int64_t end, std::int64_t i, A sum) const {
    for (std::int64_t k = begin; k < end; ++k) {
      sum += widen(dy[std::int64_t{order[k]} * columns + i]);
    }
    return sum;
  }
  template <int N>
  __device__ Packed<A, N> pack(std::int64_t begin, std::int64_t end, std::int64_t i,
                               Packed<A, N> sum) const {
    for (std::int64_t k = begin; k < end; ++k) {
      const auto row = load_pack<N>(dy + std::int64_t{order[k]} * columns + i);
      SIMT_UNROLL
      for (int j = 0; j < N; ++j) sum[j] += widen(row[j]);
    }
    return sum;
  }
};

/// A block a slot. packs: rows are whole packs, and aligned.
template <class T>
__global__ void embedding_pieces_kernel(TokenRuns runs, std::int64_t columns, bool packs,
                                        const T* dy, Arithmetic<T>* sums) {
  using A = Arithmetic<T>;
  constexpr int N = pack_width<T, A>;
  const RowSums<T> rows{runs.order, dy, columns};
  for (std::int64_t slot = blockIdx.x; slot < runs.slots(); slot += gridDim.x) {
    const Piece piece = piece_of(runs, slot);
    if (piece.begin == piece.end) continue;
    A* const to = sums + slot * columns;
    visit_row<N>(
        columns, packs ? 0 : columns,
        [&](std::int64_t i) { to[i] = rows.one(piece.begin, piece.end, i, A(0)); },
        [&](std::int64_t i) {
          const auto zeros = pack_or<N>(static_cast<const A*>(nullptr), i, A(0));
          store_pack<N>(to + i, rows.template pack<N>(piece.begin, piece.end, i, zeros));
        });
  }
}

/// A block a row of dweight: the sum of its token's rows, or of its pieces' sums. packs: rows are
/// whole packs, and aligned.
template <class T, class W>
__global__ void embedding_backward_kernel(TokenRuns runs, std::int64_t columns, bool packs,
                                          const T* dy, const Arithmetic<T>* sums, W* dweight,
                                          bool accumulate) {
  using A = Arithmetic<T>;
  constexpr int N = pack_width<T, W>;
  constexpr std::int64_t kPiece = TokenRuns::kPiece;
  const RowSums<T> rows{runs.order, dy, columns};
  for (std::int64_t v = blockIdx.x; v < runs.tokens.vocabulary; v += gridDim.x) {
    const std::int64_t begin = runs.start[v], end = runs.start[v + 1];
    if (accumulate && begin == end) continue;
    const bool in_pieces = end - begin > kPiece;
    const auto piece_sum = [&](std::int64_t place) {
      return sums + TokenRuns::slot(place, place == begin) * columns;
    };
    W* const to = dweight + v * columns;
    visit_row<N>(
        columns, packs ? 0 : columns,
        [&](std::int64_t i) {
          A sum = accumulate ? static_cast<A>(widen(to[i])) : A(0);
          if (in_pieces) {
            for (std::int64_t k = begin; k < end; k += kPiece) sum += piece_sum(k)[i];
          } else {
            sum = rows.one(begin, end, i, sum);
          }
          to[i] = narrow<W>(sum);
        },
        [&](std::int64_t i) {
          auto sum = pack_or<N>(accumulate ? to : nullptr, i, A(0));
          if (in_pieces) {
            for (std::int64_t k = begin; k < end; k += kPiece) {
              const auto part = load_pack<N>(piece_sum(k) + i);
              SIMT_UNROLL
              for (int j = 0; j < N; ++j) sum[j] += part[j];
            }
          } else {
            sum = rows.template pack<N>(begin, end, i, sum);
          }
          store_pack<N>(to + i, narrowed<W>(sum));
        });
  }
}

}  // namespace cairn::kernels::cuda
