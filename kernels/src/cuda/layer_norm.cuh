// Layer norm and RMS norm over rows [N, D], a block a row; the row is read again from cache for
// each pass. kCenter: layer norm.
#pragma once

#include "cuda/column_sums.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/softmax.cuh"

namespace cairn::kernels::cuda {

template <bool kCenter, class T>
__global__ void norm_kernel(std::int64_t rows, std::int64_t n, const T* x, AnyFloat weight,
                            AnyFloat bias, double eps, T* y, AnyFloat means, AnyFloat rstds) {
  using A = Arithmetic<T>;
  constexpr int N = pack_width<T>;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const in = x + row * n;
    T* const out = y + row * n;
    A mean = 0;
    if constexpr (kCenter) {
      mean = row_sum(in, in, n, [](std::int64_t, A v, A) { return v; }) / static_cast<A>(n);
    }
    const A squares =
        row_sum(in, in, n, [mean](std::int64_t, A v, A) { return (v - mean) * (v - mean); });
    const A rstd = A(1) / math::sqrt(squares / static_cast<A>(n) + static_cast<A>(eps));
    visit_row<N>(
        n, common_head<N>(in, out, n),
        [&](std::int64_t i) {
          const A value = (widen(in[i]) - mean) * rstd;
          out[i] = narrow<T>(math::fma(value, weight.load_or(i, A(1)), bias.load_or(i, A(0))));
        },
        [&](std::int64_t i) {
          auto pack = load_pack<N>(in + i);
          const auto w = load_pack_or<N>(weight, i, A(1));
          const auto b = load_pack_or<N>(bias, i, A(0));
          SIMT_UNROLL
          for (int k = 0; k < N; ++k) {
            pack[k] = narrow<T>(math::fma((widen(pack[k]) - mean) * rstd, w[k], b[k]));
          }
          store_pack<N>(out + i, pack);
        });
    if (threadIdx.x != 0) continue;
    rstds.store(row, rstd);
    if constexpr (kCenter) means.store(row, mean);
  }
}

/// dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy weight; RMS norm without mean(g). dx may be
/// dy.
template <bool kCenter, class T>
__global__ void norm_backward_kernel(std::int64_t rows, std::int64_t n, const T* x, AnyFloat weight,
                                     AnyFloat means, AnyFloat rstds, const T* dy, T* dx) {
  using A = Arithmetic<T>;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const in = x + row * n;
    const T* const grad = dy + row * n;
    const A rstd = rstds.load<A>(row);
    const A mean = kCenter ? means.load<A>(row) : A(0);
    const auto scaled = [&](A g, std::int64_t i) { return g * weight.load_or(i, A(1)); };
    A sum = 0;
    if constexpr (kCenter) {
      sum = row_sum(in, grad, n, [&](std::int64_t i, A, A g) { return scaled(g, i); });
    }
    const A dot = row_sum(
        in, grad, n, [&](std::int64_t i, A v, A g) { return scaled(g, i) * (v - mean) * rstd; });
    const A mean_g = sum / static_cast<A>(n), mean_dot = dot / static_cast<A>(n);
    map_row(grad, dx + row * n, n, [&](A g, std::int64_t i) {
      const A normalized = (widen(in[i]) - mean) * rstd;
      return rstd * (scaled(g, i) - mean_g - normalized * mean_dot);
    });
  }
}

/// {dy xhat, dy}: what dweight and dbias sum.
template <class T>
struct NormParameterTerms {
  using A = Arithmetic<T>;
  const T* x;
  const T* dy;
  AnyFloat means;  // absent: RMS norm
  AnyFloat rstds;
  std::int64_t columns;

  __device__ Two<A> operator()(std::int64_t row, std::int64_t column) const {
    const A g = widen(dy[row * columns + column]);
    const A mean = means.load_or(row, A(0));
    const A normalized = (widen(x[row * columns + column]) - mean) * rstds.load<A>(row);
    return {g * normalized, g};
  }
};

template <class A>
__global__ void parameter_gradients_kernel(ColumnSplit split, const A* partial, AnyFloat dweight,
                                           AnyFloat dbias, bool accumulate) {
  const std::int64_t column = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= split.columns) return;
  const Two<A> total = column_total(split, partial, column);
  if (dweight.present()) dweight.store(column, total.first, accumulate);
  if (dbias.present()) dbias.store(column, total.second, accumulate);
}

}  // namespace cairn::kernels::cuda
