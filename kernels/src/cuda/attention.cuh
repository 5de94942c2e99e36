// Fused attention in the shape of FlashAttention-2 (Dao 2023): a block keeps a tile of rows, of
// queries or of keys, in shared memory and its sums in registers, and passes over tiles of the
// others, of which the next is copied while one is worked on. The forward's softmax is online. The
// backward makes the weights anew from each row's log of its sum, once to sum dq over keys and once
// to sum dk and dv over queries: no atomics, a fixed order.
#pragma once

#include "cairn/core/generator.h"
#include "cairn/core/tensor_view.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/device/block.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/online_softmax.cuh"
#include "cuda/device/tile.cuh"
#include "math/dropout.h"

namespace cairn::kernels::cuda {

/// A [B, H, N, D] operand; strides in elements. Its rows are whole packs of 8 elements that start
/// at multiples of 16 bytes.
template <class T>
struct Heads {
  T* data;
  std::int64_t batch, head, row;

  explicit Heads(const core::TensorView& x)
      : data(static_cast<T*>(x.data)), batch(x.strides[0]), head(x.strides[1]), row(x.strides[2]) {}
  __device__ T* of(std::int64_t index, std::int64_t heads) const {
    const std::int64_t b = divide(index, heads);
    return data + b * batch + (index - b * heads) * head;
  }
};

/// Which weights are dropped: those that dropout() drops of [B, H, T, S].
struct WeightDropout {
  std::uint32_t threshold = 0;  // 0: none
  float scale = 1.0f;           // of those that stay
  core::RandomDraw draw;

  __device__ bool drops() const { return threshold != 0; }
  /// Of 32 elements from `first` on, a bit for each that stays.
  __device__ std::uint32_t kept(std::int64_t first) const {
    const core::RandomDraw now = draw.resolved();
    std::uint32_t bits = 0;
    const int skipped = static_cast<int>(first % 4);
    for (int i = -skipped; i < 32; i += 4) {
      const auto words =
          core::philox(now.seed, now.offset, static_cast<std::uint64_t>((first + i) / 4));
      SIMT_UNROLL
      for (int k = 0; k < 4; ++k) {
        const bool inside = i + k >= 0 && i + k < 32;
        if (inside && math::dropout_keeps(words[k], threshold)) bits |= 1u << (i + k);
      }
    }
    return bits;
  }
};

struct AttentionShape {
  std::int64_t heads, queries, keys;  // H, T, S
  std::int64_t sharing;               // neighbouring heads that read the same keys and values
  int columns;                        // D, a multiple of 8
  bool causal;
  const std::int64_t* key_lengths;  // of each sample; null: all S
  float scale;
  WeightDropout dropout;

  /// Keys of a head's sample.
  __device__ std::int64_t length(std::int64_t head) const {
    if (key_lengths == nullptr) return keys;
    const std::int64_t n = key_lengths[divide(head, heads)];
    return n < 0 ? 0 : n < keys ? n : keys;
  }
  /// The keys or values that a head reads.
  template <class T>
  __device__ T* read_by(std::int64_t head, const Heads<T>& x) const {
    return x.of(divide(head, sharing), divide(heads, sharing));
  }
  /// Keys that query t sees, of `length`: those before this one.
  __device__ std::int64_t visible(std::int64_t t, std::int64_t length) const {
    const std::int64_t end = causal ? t + 1 + keys - queries : length;
    return end < 0 ? 0 : end < length ? end : length;
  }
  /// The first query that sees key s, where its sample has that key.
  __device__ std::int64_t first_query(std::int64_t s) const {
    const std::int64_t first = causal ? s + queries - keys : 0;
    return first < 0 ? 0 : first;
  }
};

/// What the backward knows of a query: log2 of its sum of exponentials, +inf where it sees nothing
/// (its weights are 0 then), and the sum of dy y.
struct alignas(8) RowTerms {
  float lse, delta;
};
inline constexpr int kTermsPadding = 128;  // rows of a head's terms are a multiple of this

constexpr __device__ __host__ std::int64_t padded_rows(std::int64_t rows) {
  return (rows + kTermsPadding - 1) / kTermsPadding * kTermsPadding;
}

/// A block of `warps` warps keeps `rows` rows, a warp 16 m of them, and takes n columns at a time.
template <int m, int warps, int n>
struct Tiling {
  static constexpr int kMatrices = m, kThreads = 32 * warps, kWarpRows = 16 * m;
  static constexpr int kRows = warps * kWarpRows, kColumns = n;
};

// Sums in registers, at most 128 a thread for results and 64 for weights; shared memory within
// sm_80's 163 KiB, for halves of up to 128 columns within the 99 KiB of GPUs for workstations.
template <class T, int D>
using ForwardTiling =
    std::conditional_t<is_half_type<T>, Tiling<D <= 128 ? 2 : 1, 4, D <= 64 ? 64 : 32>,
                       Tiling<D <= 64 ? 2 : 1, 4, D <= 128 ? 32 : 16>>;
template <class T, int D>
using BackwardTiling =
    std::conditional_t<is_half_type<T>, Tiling<D <= 64 ? 2 : 1, 4, D <= 128 ? 32 : 16>,
                       Tiling<1, D <= 128 ? 4 : 2, D <= 128 ? 32 : 16>>;

/// A block's shared memory: one or two tiles of rows; two stages of two tiles of columns and of the
/// columns' terms; bits of what dropout keeps, which each warp makes for itself.
template <class T, int D, class Tile, int RowTiles>
struct AttentionMemory {
  static constexpr int kStride = tile_stride<T, D>;
  static constexpr int kRowTile = Tile::kRows * kStride, kColumnTile = Tile::kColumns * kStride;
  static constexpr int kTiles = RowTiles * kRowTile + 4 * kColumnTile;
  static constexpr int kWordsPerRow = (Tile::kColumns + 31) / 32;
  static constexpr int kKept = Tile::kWarpRows * kWordsPerRow;  // words a warp
  static constexpr int kKeptWords = kKept > Tile::kColumns ? kKept : Tile::kColumns;
  static constexpr std::size_t kBytes = sizeof(T) * kTiles + 2 * Tile::kColumns * sizeof(RowTerms) +
                                        4 * kKeptWords * (Tile::kThreads / 32);

  T* start;
  __device__ T* rows(int tile) const { return start + tile * kRowTile; }
  __device__ T* warp_rows(int tile) const {
    return rows(tile) + static_cast<int>(threadIdx.x / 32) * Tile::kWarpRows * kStride;
  }
  __device__ T* columns(int stage, int tile) const {
    return start + RowTiles * kRowTile + (2 * stage + tile) * kColumnTile;
  }
  __device__ RowTerms* terms(int stage) const {
    return reinterpret_cast<RowTerms*>(start + kTiles) + stage * Tile::kColumns;
  }
  __device__ std::uint32_t* kept() const {
    return reinterpret_cast<std::uint32_t*>(terms(2)) + threadIdx.x / 32 * kKeptWords;
  }
};

template <class T, int D>
using ForwardMemory = AttentionMemory<T, D, ForwardTiling<T, D>, 1>;
template <class T, int D>
using BackwardMemory = AttentionMemory<T, D, BackwardTiling<T, D>, 2>;

/// Brings rows of a head's x [n, columns] into tiles of Rows x D, tile after tile from row `first`
/// on.
template <int Rows, int D, int Threads, class T>
class TileLoader {
 public:
  __device__ TileLoader(const T* x, std::int64_t stride, std::int64_t first, std::int64_t n,
                        int columns)
      : from_(x + (first + thread_row()) * stride + thread_column()),
        stride_(stride),
        left_(n - first),
        inside_(thread_column() < columns) {}

  /// With zeros beyond x.
  __device__ __forceinline__ void next(T* tile) {
    T* const to = tile + thread_row() * tile_stride<T, D> + thread_column();
    SIMT_UNROLL
    for (int row = 0; row < Rows; row += kStep) {
      if (inside_ && row + thread_row() < left_) {
        copy_async_16(to + row * tile_stride<T, D>, from_);
      } else {
        store_shared(to + row * tile_stride<T, D>, Packed<T, kPack>{});
      }
      from_ += kStep * stride_;
    }
    left_ -= Rows;
  }

 private:
  static constexpr int kPack = pack_width<T>, kPacks = D / kPack, kStep = Threads / kPacks;
  static_assert(Threads % kPacks == 0 && Rows % kStep == 0);
  static __device__ int thread_row() { return static_cast<int>(threadIdx.x) / kPacks; }
  static __device__ int thread_column() { return static_cast<int>(threadIdx.x) % kPacks * kPack; }

  const T* from_;
  std::int64_t stride_, left_;
  bool inside_;
};

template <int Rows, int D, int Threads, class T>
__device__ __forceinline__ void load_rows(T* tile, const T* x, std::int64_t stride,
                                          std::int64_t first, std::int64_t n,
                                          const AttentionShape& shape) {
  TileLoader<Rows, D, Threads, T>(x, stride, first, n, shape.columns).next(tile);
}

/// The warp's rows of a result, times factor(m, r) for row(m, 2 r), by way of shared memory of its
/// own: to y, of whose rows `rows` are there.
template <int M, int D, class T, class Factor>
__device__ __forceinline__ void store_rows(const Sums<M, D>& sums, Factor factor, T* tile, T* y,
                                           std::int64_t stride, std::int64_t rows,
                                           const AttentionShape& shape) {
  constexpr int kStride = tile_stride<T, D>, kPack = pack_width<T>, kPacks = D / kPack;
  SIMT_UNROLL
  for (int m = 0; m < M; ++m) {
    SIMT_UNROLL
    for (int r = 0; r < 2; ++r) {
      T* const to = tile + Sums<M, D>::row(m, 2 * r) * kStride;
      const float by = factor(m, r);
      SIMT_UNROLL
      for (int j = 0; j < D / 8; ++j) {
        const float* const pair = sums.of[m][j] + 2 * r;
        store_shared(to + Sums<M, D>::column(j, 0), narrow_pair<T>(pair[0] * by, pair[1] * by));
      }
    }
  }
  __syncwarp();
  for (int at = lane_index(); at < 16 * M * kPacks; at += 32) {
    const int row = at / kPacks, column = at % kPacks * kPack;
    if (row >= rows || column >= shape.columns) continue;
    store_pack<kPack>(y + row * stride + column, shared_pack<kPack>(tile + row * kStride + column));
  }
}

/// work(tile, stage) for tiles [first, last), with load(tile, stage) of the next under way. What
/// was being copied before has arrived in the first; after the last the block's memory is free.
template <class Load, class Work>
__device__ __forceinline__ void for_each_tile(int first, int last, Load load, Work work) {
  int stage = 0;
  if (first < last) load(first, stage);
  for (int tile = first; tile < last; ++tile, stage ^= 1) {
    wait_for_copies();
    __syncthreads();
    if (tile + 1 < last) load(tile + 1, stage ^ 1);
    work(tile, stage);
  }
  wait_for_copies();
  __syncthreads();
}

/// Sets what a query does not see: in rows of queries, row 0 for query t and column 0 for key s.
template <int M, int N>
__device__ __forceinline__ void hide(Sums<M, N>& scores, float value, const AttentionShape& shape,
                                     std::int64_t length, std::int64_t t, std::int64_t s) {
  SIMT_UNROLL
  for (int m = 0; m < M; ++m) {
    SIMT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = Sums<M, N>::row(m, 2 * r);
      const int end = static_cast<int>(smaller(shape.visible(t + row, length) - s, N));
      SIMT_UNROLL
      for (int j = 0; j < N / 8; ++j) {
        SIMT_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& score = scores.of[m][j][2 * r + i];
          if (Sums<M, N>::column(j, i) >= end) score = value;
        }
      }
    }
  }
}

/// Which of a warp's weights stay, for rows of queries: words of N bits, a row after the other. The
/// words of the warp's last tile must have been read.
template <int M, int N>
__device__ __forceinline__ void draw_rows(std::uint32_t* kept, const AttentionShape& shape,
                                          std::int64_t head, std::int64_t t, std::int64_t s) {
  constexpr int kWords = (N + 31) / 32;
  SIMT_UNROLL_BY(1)
  for (int i = lane_index(); i < 16 * M * kWords; i += 32) {
    const std::int64_t row = head * shape.queries + t + i / kWords;
    kept[i] = shape.dropout.kept(row * shape.keys + s + i % kWords * 32);
  }
  __syncwarp();
}
template <int M, int N>
__device__ __forceinline__ void drop_rows(Sums<M, N>& weights, const std::uint32_t* kept) {
  constexpr int kWords = (N + 31) / 32;
  weights.each([&](float& weight, int m, int j, int i) {
    const int column = Sums<M, N>::column(j, i);
    const std::uint32_t word = kept[Sums<M, N>::row(m, i) * kWords + column / 32];
    if ((word >> column % 32 & 1u) == 0) weight = 0.0f;
  });
}

/// The same for rows of keys: a word for each query's column, a bit for each row.
template <int N>
__device__ __forceinline__ void draw_columns(std::uint32_t* kept, const AttentionShape& shape,
                                             std::int64_t head, std::int64_t t, std::int64_t s) {
  SIMT_UNROLL_BY(1)
  for (int i = lane_index(); i < N; i += 32) {
    kept[i] = shape.dropout.kept((head * shape.queries + t + i) * shape.keys + s);
  }
  __syncwarp();
}
/// Gives weights, which are not negative, a sign where they are dropped.
template <int M, int N>
__device__ __forceinline__ void negate_dropped(Sums<M, N>& weights, const std::uint32_t* kept) {
  weights.each([&](float& weight, int m, int j, int i) {
    const std::uint32_t word = kept[Sums<M, N>::column(j, i)];
    if ((word >> Sums<M, N>::row(m, i) & 1u) == 0) weight = -weight;
  });
}

/// Grid: a block for each tile of queries of each head, in a head those that see most first.
template <class T, int D>
__global__ void __launch_bounds__(ForwardTiling<T, D>::kThreads, 1)
    attention_kernel(AttentionShape shape, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> y,
                     float* lse) {
  using Tile = ForwardTiling<T, D>;
  using Memory = ForwardMemory<T, D>;
  constexpr int M = Tile::kMatrices, N = Tile::kColumns, kThreads = Tile::kThreads;
  SIMT_DYNAMIC_SHARED(T, start);
  const Memory memory{start};
  const float scale = shape.scale * kLog2E;
  const bool drops = shape.dropout.drops();
  const std::int64_t tiles = (shape.queries + Tile::kRows - 1) / Tile::kRows;
  const std::int64_t head = divide(blockIdx.x, tiles);
  const std::int64_t t0 = (tiles - 1 - (blockIdx.x - head * tiles)) * Tile::kRows;
  const std::int64_t last_row = smaller(t0 + Tile::kRows, shape.queries) - 1;
  const std::int64_t length = shape.length(head);
  const std::int64_t warp_t = t0 + threadIdx.x / 32 * Tile::kWarpRows;
  TileLoader<N, D, kThreads, T> keys(shape.read_by(head, k), k.row, 0, shape.keys, shape.columns);
  TileLoader<N, D, kThreads, T> values(shape.read_by(head, v), v.row, 0, shape.keys, shape.columns);

  Sums<M, D> out = {};
  OnlineSoftmax<M> softmax;
  load_rows<Tile::kRows, D, kThreads>(memory.rows(0), q.of(head, shape.heads), q.row, t0,
                                      shape.queries, shape);
  for_each_tile(
      0, static_cast<int>((shape.visible(last_row, length) + N - 1) / N),
      [&](int, int stage) {
        keys.next(memory.columns(stage, 0));
        values.next(memory.columns(stage, 1));
      },
      [&](int tile, int stage) {
        const std::int64_t s = std::int64_t{tile} * N;
        if (drops) draw_rows<M, N>(memory.kept(), shape, head, warp_t, s);
        Sums<M, N> scores = {};
        add_product_transposed<D>(scores, memory.warp_rows(0), memory.columns(stage, 0));
        scores.each([&](float& score, int, int, int) { score *= scale; });
        if (s + N > shape.visible(t0, length)) hide(scores, -kInfinity, shape, length, warp_t, s);
        softmax.add(scores, out);
        if (drops) drop_rows(scores, memory.kept());
        add_product(out, scores, memory.columns(stage, 1));
      });

  softmax.finish();
  const auto factor = [&](int m, int r) {
    return softmax.sum[m][r] == 0.0f ? 0.0f : shape.dropout.scale / softmax.sum[m][r];
  };
  const std::int64_t rows = shape.queries - warp_t;
  store_rows(out, factor, memory.warp_rows(0), y.of(head, shape.heads) + warp_t * y.row, y.row,
             rows, shape);
  SIMT_UNROLL
  for (int m = 0; m < M; ++m) {
    SIMT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = Sums<M, D>::row(m, 2 * r);
      if (lane_index() % 4 != 0 || row >= rows) continue;
      lse[head * shape.queries + warp_t + row] =
          softmax.max[m][r] * kLn2 + math::log(softmax.sum[m][r]);
    }
  }
}

/// D / 8 neighbouring threads a row of [B, H, padded_rows(T)].
template <class T, int D>
__global__ void attention_rows_kernel(AttentionShape shape, std::int64_t rows, Heads<T> y,
                                      Heads<T> dy, const float* lse, RowTerms* terms) {
  constexpr int kLanes = D / 8;
  const std::int64_t padded = padded_rows(shape.queries);
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * kLanes;
       i += step) {
    const std::int64_t row = i / kLanes, head = divide(row, padded), t = row - head * padded;
    const int column = static_cast<int>(i % kLanes) * 8;
    const bool inside = t < shape.queries && column < shape.columns;
    const T* const left = y.of(head, shape.heads) + t * y.row + column;
    const T* const right = dy.of(head, shape.heads) + t * dy.row + column;
    float sum = 0.0f;
    if (inside) {
      const auto a = load_pack<8>(left), b = load_pack<8>(right);
      SIMT_UNROLL
      for (int c = 0; c < 8; ++c) sum += widen(a[c]) * widen(b[c]);
    }
    SIMT_UNROLL
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    if (column != 0) continue;
    const float log_sum = inside ? lse[head * shape.queries + t] : -kInfinity;
    const bool blind = log_sum == -kInfinity;
    terms[row] = {blind ? kInfinity : log_sum * kLog2E, sum};
  }
}

/// dq. Grid: as the forward's.
template <class T, int D>
__global__ void __launch_bounds__(BackwardTiling<T, D>::kThreads, 1)
    attention_queries_kernel(AttentionShape shape, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> dy,
                             const RowTerms* terms, Heads<T> dq) {
  using Tile = BackwardTiling<T, D>;
  using Memory = BackwardMemory<T, D>;
  constexpr int M = Tile::kMatrices, N = Tile::kColumns, kThreads = Tile::kThreads;
  SIMT_DYNAMIC_SHARED(T, start);
  const Memory memory{start};
  const float scale = shape.scale * kLog2E;
  const bool drops = shape.dropout.drops();
  const std::int64_t tiles = (shape.queries + Tile::kRows - 1) / Tile::kRows;
  const std::int64_t head = divide(blockIdx.x, tiles);
  const std::int64_t t0 = (tiles - 1 - (blockIdx.x - head * tiles)) * Tile::kRows;
  const std::int64_t last_row = smaller(t0 + Tile::kRows, shape.queries) - 1;
  const std::int64_t length = shape.length(head);
  const std::int64_t warp_t = t0 + threadIdx.x / 32 * Tile::kWarpRows;
  TileLoader<N, D, kThreads, T> keys(shape.read_by(head, k), k.row, 0, shape.keys, shape.columns);
  TileLoader<N, D, kThreads, T> values(shape.read_by(head, v), v.row, 0, shape.keys, shape.columns);

  load_rows<Tile::kRows, D, kThreads>(memory.rows(0), q.of(head, shape.heads), q.row, t0,
                                      shape.queries, shape);
  load_rows<Tile::kRows, D, kThreads>(memory.rows(1), dy.of(head, shape.heads), dy.row, t0,
                                      shape.queries, shape);
  RowTerms row_terms[M][2];
  SIMT_UNROLL
  for (int m = 0; m < M; ++m) {
    SIMT_UNROLL
    for (int r = 0; r < 2; ++r) {
      row_terms[m][r] =
          terms[head * padded_rows(shape.queries) + warp_t + Sums<M, N>::row(m, 2 * r)];
    }
  }
  Sums<M, D> out = {};
  for_each_tile(
      0, static_cast<int>((shape.visible(last_row, length) + N - 1) / N),
      [&](int, int stage) {
        keys.next(memory.columns(stage, 0));
        values.next(memory.columns(stage, 1));
      },
      [&](int tile, int stage) {
        const std::int64_t s = std::int64_t{tile} * N;
        if (drops) draw_rows<M, N>(memory.kept(), shape, head, warp_t, s);
        Sums<M, N> weights = {}, gradient = {};
        add_product_transposed<D>(weights, memory.warp_rows(0), memory.columns(stage, 0));
        weights.each([&](float& weight, int m, int, int i) {
          weight = power_of_two(weight * scale - row_terms[m][i / 2].lse);
        });
        if (s + N > shape.visible(t0, length)) hide(weights, 0.0f, shape, length, warp_t, s);
        add_product_transposed<D>(gradient, memory.warp_rows(1), memory.columns(stage, 1));
        if (drops) drop_rows(gradient, memory.kept());
        weights.each([&](float& weight, int m, int j, int i) {
          weight *= gradient.of[m][j][i] * shape.dropout.scale - row_terms[m][i / 2].delta;
        });
        add_product(out, weights, memory.columns(stage, 0));
      });
  store_rows(
      out, [&](int, int) { return shape.scale; }, memory.warp_rows(0),
      dq.of(head, shape.heads) + warp_t * dq.row, dq.row, shape.queries - warp_t, shape);
}

enum class KeyGradients { both, keys, values };

/// dk, dv or both. Grid: a block for each tile of keys of each head of keys, in a head those that
/// most see first. The queries of heads that share it come one head after the other.
template <class T, int D, KeyGradients Which>
__global__ void __launch_bounds__(BackwardTiling<T, D>::kThreads, 1)
    attention_keys_kernel(AttentionShape shape, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> dy,
                          const RowTerms* terms, Heads<T> dk, Heads<T> dv) {
  using Tile = BackwardTiling<T, D>;
  using Memory = BackwardMemory<T, D>;
  constexpr int M = Tile::kMatrices, N = Tile::kColumns, kThreads = Tile::kThreads;
  constexpr bool kKeys = Which != KeyGradients::values, kValues = Which != KeyGradients::keys;
  SIMT_DYNAMIC_SHARED(T, start);
  const Memory memory{start};
  const float scale = shape.scale * kLog2E;
  const bool drops = shape.dropout.drops();
  const std::int64_t tiles = (shape.keys + Tile::kRows - 1) / Tile::kRows;
  const std::int64_t key_head = divide(blockIdx.x, tiles), first_head = key_head * shape.sharing;
  const std::int64_t s0 = (blockIdx.x - key_head * tiles) * Tile::kRows;
  const std::int64_t warp_s = s0 + threadIdx.x / 32 * Tile::kWarpRows;
  const std::int64_t length = shape.length(first_head);
  const auto tile_count = static_cast<int>((shape.queries + N - 1) / N);
  const int first_tile = s0 < length ? static_cast<int>(shape.first_query(s0) / N) : tile_count;
  const std::int64_t first_row = std::int64_t{first_tile} * N;

  load_rows<Tile::kRows, D, kThreads>(memory.rows(0), shape.read_by(first_head, k), k.row, s0,
                                      shape.keys, shape);
  if constexpr (kKeys) {
    load_rows<Tile::kRows, D, kThreads>(memory.rows(1), shape.read_by(first_head, v), v.row, s0,
                                        shape.keys, shape);
  }
  Sums<M, D> key_sums = {}, value_sums = {};
  SIMT_UNROLL_BY(1)
  for (std::int64_t head = first_head; head < first_head + shape.sharing; ++head) {
    TileLoader<N, D, kThreads, T> queries(q.of(head, shape.heads), q.row, first_row, shape.queries,
                                          shape.columns);
    TileLoader<N, D, kThreads, T> gradients(dy.of(head, shape.heads), dy.row, first_row,
                                            shape.queries, shape.columns);
    const RowTerms* const head_terms = terms + head * padded_rows(shape.queries);
    for_each_tile(
        first_tile, tile_count,
        [&](int tile, int stage) {
          queries.next(memory.columns(stage, 0));
          gradients.next(memory.columns(stage, 1));
          const int i = static_cast<int>(threadIdx.x) * 2;
          if (i < N)
            copy_async_16(memory.terms(stage) + i, head_terms + std::int64_t{tile} * N + i);
        },
        [&](int tile, int stage) {
          const std::int64_t t = std::int64_t{tile} * N;
          const RowTerms* const column_terms = memory.terms(stage);
          if (drops) draw_columns<N>(memory.kept(), shape, head, t, warp_s);
          Sums<M, N> weights = {};
          add_product_transposed<D>(weights, memory.warp_rows(0), memory.columns(stage, 0));
          weights.each([&](float& weight, int, int j, int i) {
            weight = power_of_two(weight * scale - column_terms[Sums<M, N>::column(j, i)].lse);
          });
          if (s0 + Tile::kRows > shape.visible(t, length)) {
            const int diagonal = shape.causal
                                     ? static_cast<int>(warp_s + shape.queries - shape.keys - t)
                                     : -Tile::kRows;
            const auto end = static_cast<int>(length - warp_s);
            weights.each([&](float& weight, int m, int j, int i) {
              const int row = Sums<M, N>::row(m, i);
              if (Sums<M, N>::column(j, i) - row < diagonal || row >= end) weight = 0.0f;
            });
          }
          if (drops) negate_dropped(weights, memory.kept());
          if constexpr (kValues) {
            Sums<M, N> kept = weights;
            kept.each(
                [&](float& weight, int, int, int) { weight = weight < 0.0f ? 0.0f : weight; });
            add_product(value_sums, kept, memory.columns(stage, 1));
          }
          if constexpr (kKeys) {
            Sums<M, N> gradient = {};
            add_product_transposed<D>(gradient, memory.warp_rows(1), memory.columns(stage, 1));
            weights.each([&](float& weight, int m, int j, int i) {
              const float g = weight < 0.0f ? 0.0f : gradient.of[m][j][i] * shape.dropout.scale;
              weight = fabsf(weight) * (g - column_terms[Sums<M, N>::column(j, i)].delta);
            });
            add_product(key_sums, weights, memory.columns(stage, 0));
          }
        });
  }
  const std::int64_t rows = shape.keys - warp_s;
  if constexpr (kKeys) {
    store_rows(
        key_sums, [&](int, int) { return shape.scale; }, memory.warp_rows(0),
        shape.read_by(first_head, dk) + warp_s * dk.row, dk.row, rows, shape);
  }
  if constexpr (kValues) {
    store_rows(
        value_sums, [&](int, int) { return shape.dropout.scale; }, memory.warp_rows(1),
        shape.read_by(first_head, dv) + warp_s * dv.row, dv.row, rows, shape);
  }
}

}  // namespace cairn::kernels::cuda
