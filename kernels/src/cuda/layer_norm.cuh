// Layer norm and RMS norm over rows [N, D], a block a row; the row is read again from cache for
// each pass. kCenter: layer norm.
#pragma once

#include "cuda/column_sums.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/softmax.cuh"

namespace cairn::kernels::cuda {

/// W is the storage type of weight and bias; RMS norm has no bias.
template <bool kCenter, class T, class W>
__global__ void norm_kernel(std::int64_t rows, std::int64_t n, const T* x, const W* weight,
                            const W* bias, double eps, T* y, AnyFloat means, AnyFloat rstds) {
  using A = Arithmetic<T>;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const in = x + row * n;
    A mean = 0;
    if constexpr (kCenter) {
      mean = row_sum(
                 n, [](std::int64_t, A v) { return v; }, in) /
             static_cast<A>(n);
    }
    const auto square = [mean](std::int64_t, A v) { return (v - mean) * (v - mean); };
    const A squares = row_sum(n, square, in);
    const A rstd = A(1) / math::sqrt(squares / static_cast<A>(n) + static_cast<A>(eps));
    if constexpr (kCenter) {
      const auto affine = [=](std::int64_t, A v, A w, A b) {
        return math::fma((v - mean) * rstd, w, b);
      };
      map_row(n, affine, y + row * n, in, weight, bias);
    } else {
      map_row(
          n, [=](std::int64_t, A v, A w) { return v * rstd * w; }, y + row * n, in, weight);
    }
    if (threadIdx.x != 0) continue;
    rstds.store(row, rstd);
    if constexpr (kCenter) means.store(row, mean);
  }
}

/// dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy weight; RMS norm without mean(g). dx may be
/// dy.
template <bool kCenter, class T, class W>
__global__ void norm_backward_kernel(std::int64_t rows, std::int64_t n, const T* x, const W* weight,
                                     const Arithmetic<T>* means, const Arithmetic<T>* rstds,
                                     const T* dy, T* dx) {
  using A = Arithmetic<T>;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const in = x + row * n;
    const T* const grad = dy + row * n;
    const A rstd = rstds[row];
    const A mean = kCenter ? means[row] : A(0);
    const auto terms = [=](std::int64_t, A v, A g, A w) {
      return Two<A>{kCenter ? g * w : A(0), g * w * (v - mean) * rstd};
    };
    const Two<A> sums = row_sum(n, terms, in, grad, weight);
    const A mean_g = sums.first / static_cast<A>(n), mean_dot = sums.second / static_cast<A>(n);
    const auto gradient = [=](std::int64_t, A v, A g, A w) {
      return rstd * (g * w - mean_g - (v - mean) * rstd * mean_dot);
    };
    map_row(n, gradient, dx + row * n, in, grad, weight);
  }
}

/// {dy xhat, dy}: what dweight and dbias sum.
template <class T>
struct NormParameterTerms {
  using A = Arithmetic<T>;
  static constexpr int kWidth = pack_width<T>;
  struct Constants {};
  const T* x;
  const T* dy;
  const A* means;  // nullptr: RMS norm
  const A* rstds;
  std::int64_t columns;

  __device__ Constants constants(std::int64_t) const { return {}; }
  __device__ Two<A> value(std::int64_t row, std::int64_t column) const {
    const A g = widen(dy[row * columns + column]);
    const A mean = element_or(means, row, A(0));
    return {g * (widen(x[row * columns + column]) - mean) * rstds[row], g};
  }
  __device__ void add(Constants, std::int64_t row, std::int64_t column,
                      Packed<Two<A>, kWidth>& sums) const {
    const auto in = load_pack<kWidth>(x + row * columns + column);
    const auto grad = load_pack<kWidth>(dy + row * columns + column);
    const A mean = element_or(means, row, A(0)), rstd = rstds[row];
    SIMT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      const A g = widen(grad[k]);
      sums[k] = sums[k] + Two<A>{g * (widen(in[k]) - mean) * rstd, g};
    }
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
