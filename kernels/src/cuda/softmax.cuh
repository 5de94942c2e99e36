// Softmax of rows, a block a row. Forward: one pass for max and sum together (Milakov & Gimelshein
// 2018), one to write; the second read comes from cache for rows of usual length. Backward: one
// pass for the dot product, one to write.
#pragma once

#include <limits>

#include "cuda/device/block.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

/// sum = sum of exp(x - max) over what was seen.
template <class A>
struct OnlineSum {
  A max, sum;

  static __device__ OnlineSum none() { return {-std::numeric_limits<A>::infinity(), A(0)}; }
  __device__ void add(A x) { *this = merge(*this, {x, A(1)}); }
  /// exp(from - to), 1 where they are equal (infinities too).
  static __device__ A factor(A from, A to) { return from == to ? A(1) : math::exp(from - to); }
  static __device__ OnlineSum merge(OnlineSum a, OnlineSum b) {
    const A max = math::max(a.max, b.max);
    return {max, a.sum * factor(a.max, max) + b.sum * factor(b.max, max)};
  }
  __device__ A log_sum_exp() const { return max + math::log(sum); }
};

struct MergeOnlineSums {
  template <class A>
  __device__ OnlineSum<A> operator()(OnlineSum<A> a, OnlineSum<A> b) const {
    return OnlineSum<A>::merge(a, b);
  }
};

/// Of scale * x[0..n); every thread of the block gets it. `seen(value)` is called for each element.
template <class T, class Seen>
__device__ OnlineSum<Arithmetic<T>> row_online_sum(const T* x, std::int64_t n, Arithmetic<T> scale,
                                                   Seen seen) {
  using A = Arithmetic<T>;
  constexpr int N = pack_width<T>;
  auto sum = OnlineSum<A>::none();
  visit_row<N>(
      n, elements_to_alignment<N>(x, n),
      [&](std::int64_t i) {
        const A value = widen(x[i]);
        seen(value);
        sum.add(scale * value);
      },
      [&](std::int64_t i) {
        const auto pack = load_pack<N>(x + i);
        A max = scale * widen(pack[0]);
        SIMT_UNROLL
        for (int k = 1; k < N; ++k) max = math::max(max, scale * widen(pack[k]));
        OnlineSum<A> part{max, A(0)};
        SIMT_UNROLL
        for (int k = 0; k < N; ++k) {
          const A value = widen(pack[k]);
          seen(value);
          part.sum += OnlineSum<A>::factor(scale * value, max);
        }
        sum = OnlineSum<A>::merge(sum, part);
      });
  return block_reduce(sum, MergeOnlineSums{}, OnlineSum<A>::none());
}

/// Where packs start in a row that is read from a and written to b: n where their alignments
/// differ.
template <int N, class T>
__device__ std::int64_t common_head(const T* a, const T* b, std::int64_t n) {
  const std::int64_t head = elements_to_alignment<N>(a, n);
  return elements_to_alignment<N>(b, n) == head ? head : n;
}

/// y[i] = f(x[i], i) for a row.
template <class T, class F>
__device__ void map_row(const T* x, T* y, std::int64_t n, F f) {
  constexpr int N = pack_width<T>;
  visit_row<N>(
      n, common_head<N>(x, y, n), [&](std::int64_t i) { y[i] = narrow<T>(f(widen(x[i]), i)); },
      [&](std::int64_t i) {
        auto pack = load_pack<N>(x + i);
        SIMT_UNROLL
        for (int k = 0; k < N; ++k) pack[k] = narrow<T>(f(widen(pack[k]), i + k));
        store_pack<N>(y + i, pack);
      });
}

struct SoftmaxShape {
  std::int64_t rows, columns;
  std::int64_t queries;  // T of a causal [T, columns]; 0: every column is seen
  bool log;
  double scale;

  __device__ std::int64_t visible(std::int64_t row) const {
    if (queries == 0) return columns;
    const std::int64_t t = row - divide(row, queries) * queries;
    const std::int64_t last = t + columns - queries + 1;
    return last < 0 ? 0 : last < columns ? last : columns;
  }
};

/// y may be x: the second pass reads an element before the same thread writes it.
template <class T>
__global__ void softmax_kernel(SoftmaxShape shape, const T* x, T* y) {
  using A = Arithmetic<T>;
  const A scale = static_cast<A>(shape.scale);
  const A hidden = shape.log ? -std::numeric_limits<A>::infinity() : A(0);
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const T* const from = x + row * shape.columns;
    T* const to = y + row * shape.columns;
    const std::int64_t n = shape.visible(row);
    const auto sum = row_online_sum(from, n, scale, [](A) {});
    if (shape.log) {
      const A log_sum = math::log(sum.sum);
      map_row(from, to, n, [&](A v, std::int64_t) { return scale * v - sum.max - log_sum; });
    } else {
      const A inverse = A(1) / sum.sum;
      map_row(from, to, n,
              [&](A v, std::int64_t) { return math::exp(scale * v - sum.max) * inverse; });
    }
    for (std::int64_t i = n + threadIdx.x; i < shape.columns; i += blockDim.x)
      to[i] = narrow<T>(hidden);
  }
}

/// Sum over a row of f(i, a[i], b[i]); the same value in every thread.
template <class T, class F>
__device__ Arithmetic<T> row_sum(const T* a, const T* b, std::int64_t n, F f) {
  constexpr int N = pack_width<T>;
  Arithmetic<T> sum = 0;
  visit_row<N>(
      n, common_head<N>(a, b, n), [&](std::int64_t i) { sum += f(i, widen(a[i]), widen(b[i])); },
      [&](std::int64_t i) {
        const auto pack_a = load_pack<N>(a + i);
        const auto pack_b = load_pack<N>(b + i);
        SIMT_UNROLL
        for (int k = 0; k < N; ++k) sum += f(i + k, widen(pack_a[k]), widen(pack_b[k]));
      });
  return block_sum(sum);
}

/// dx may be dy.
template <class T>
__global__ void softmax_backward_kernel(SoftmaxShape shape, const T* y, const T* dy, T* dx) {
  using A = Arithmetic<T>;
  const A scale = static_cast<A>(shape.scale);
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const std::int64_t start = row * shape.columns, n = shape.visible(row);
    const T* const out = y + start;
    const bool log = shape.log;
    const A sum =
        row_sum(out, dy + start, n, [&](std::int64_t, A p, A g) { return log ? g : p * g; });
    map_row(dy + start, dx + start, n, [&](A g, std::int64_t i) {
      const A p = widen(out[i]);
      return scale * (log ? g - math::exp(p) * sum : p * (g - sum));
    });
    for (std::int64_t i = n + threadIdx.x; i < shape.columns; i += blockDim.x) {
      dx[start + i] = narrow<T>(A(0));
    }
  }
}

}  // namespace cairn::kernels::cuda
