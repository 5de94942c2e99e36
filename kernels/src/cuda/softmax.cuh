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
      n, elements_to_alignment(x, n),
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

template <class T, int N, class F, class... In>
__device__ __forceinline__ Packed<T, N> mapped(F& f, std::int64_t i, const Packed<In, N>&... x) {
  Packed<T, N> result;
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) result[k] = narrow<T>(f(i + k, widen(x[k])...));
  return result;
}
template <int N, class S, class F, class... In>
__device__ __forceinline__ void add_mapped(S& sum, F& f, std::int64_t i,
                                           const Packed<In, N>&... x) {
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) sum = sum + f(i + k, widen(x[k])...);
}

/// y[i] = f(i, x[i]...) for a row.
template <class T, class F, class... In>
__device__ void map_row(std::int64_t n, F f, T* y, const In*... x) {
  constexpr int N = pack_width<T, In...>;
  visit_row<N>(
      n, common_head(n, y, x...), [&](std::int64_t i) { y[i] = narrow<T>(f(i, widen(x[i])...)); },
      [&](std::int64_t i) { store_pack<N>(y + i, mapped<T, N>(f, i, load_pack<N>(x + i)...)); });
}

struct SoftmaxShape {
  std::int64_t rows, columns;
  std::int64_t queries;         // T of a causal [T, columns]; 0: every column is seen
  std::int64_t rows_of_length;  // that see as many columns
  const std::int64_t* lengths;  // how many; null: all
  bool log;
  double scale;

  __device__ std::int64_t visible(std::int64_t row) const {
    const std::int64_t n =
        lengths == nullptr ? columns : smaller(lengths[divide(row, rows_of_length)], columns);
    std::int64_t end = n;
    if (queries > 0) {
      const std::int64_t t = row - divide(row, queries) * queries;
      end = smaller(t + columns - queries + 1, n);
    }
    return end < 0 ? 0 : end;
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
      const auto normalized = [&](std::int64_t, A v) { return scale * v - sum.max - log_sum; };
      map_row(n, normalized, to, from);
    } else {
      const A inverse = A(1) / sum.sum;
      const auto share = [&](std::int64_t, A v) {
        return math::exp(scale * v - sum.max) * inverse;
      };
      map_row(n, share, to, from);
    }
    map_row(
        shape.columns - n, [&](std::int64_t) { return hidden; }, to + n);
  }
}

/// Sum over a row of f(i, x[i]...); the same value in every thread.
template <class F, class... In>
__device__ auto row_sum(std::int64_t n, F f, const In*... x) {
  constexpr int N = pack_width<In...>;
  decltype(f(std::int64_t{}, widen(*x)...)) sum{};
  visit_row<N>(
      n, common_head(n, x...), [&](std::int64_t i) { sum = sum + f(i, widen(x[i])...); },
      [&](std::int64_t i) { add_mapped<N>(sum, f, i, load_pack<N>(x + i)...); });
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
    const auto term = [log](std::int64_t, A p, A g) { return log ? g : p * g; };
    const A sum = row_sum(n, term, out, dy + start);
    const auto gradient = [&](std::int64_t, A p, A g) {
      return scale * (log ? g - math::exp(p) * sum : p * (g - sum));
    };
    map_row(n, gradient, dx + start, out, dy + start);
    map_row(
        shape.columns - n, [](std::int64_t) { return A(0); }, dx + start + n);
  }
}

}  // namespace cairn::kernels::cuda
