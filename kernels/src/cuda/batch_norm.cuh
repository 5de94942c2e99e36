// Batch norm over a row-major [M, C] matrix (channels-last images, M = N H W). Forward: column
// sums, C results, one pass that writes y. Backward: column sums of dy and dy xhat, C results, one
// pass that writes dx.
//
// Variances come from sums of d and d^2, d = x - (the column's first element): stable where the
// mean is far from zero.
#pragma once

#include "cuda/column_sums.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

template <class T>
struct DeviationTerms {
  using A = Arithmetic<T>;
  const T* x;
  std::int64_t columns;
  __device__ Two<A> operator()(std::int64_t row, std::int64_t column) const {
    const A d = widen(x[row * columns + column]) - widen(x[column]);
    return {d, d * d};
  }
};

/// What each channel needs in the elementwise pass: y = (x - mean) scale + shift.
template <class A>
struct ChannelScale {
  A* mean;
  A* scale;
  A* shift;
};

template <class T>
__global__ void batch_statistics_kernel(ColumnSplit split, const Arithmetic<T>* partial, const T* x,
                                        AnyFloat weight, AnyFloat bias, AnyFloat running_mean,
                                        AnyFloat running_var, double eps, double momentum,
                                        AnyFloat mean, AnyFloat rstd,
                                        ChannelScale<Arithmetic<T>> out) {
  using A = Arithmetic<T>;
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= split.columns) return;
  const Two<A> total = column_total(split, partial, c);
  const double n = static_cast<double>(split.rows);
  const double shifted = static_cast<double>(total.first) / n;
  const double variance = fmax(static_cast<double>(total.second) / n - shifted * shifted, 0.0);
  const double average = static_cast<double>(widen(x[c])) + shifted;
  const double inverse = 1.0 / sqrt(variance + eps);
  mean.store(c, average);
  rstd.store(c, inverse);
  if (running_mean.present()) {
    const double old = running_mean.load<double>(c);
    running_mean.store(c, (1.0 - momentum) * old + momentum * average);
  }
  if (running_var.present()) {
    const double unbiased = n > 1.0 ? variance * n / (n - 1.0) : variance;
    const double old = running_var.load<double>(c);
    running_var.store(c, (1.0 - momentum) * old + momentum * unbiased);
  }
  out.mean[c] = static_cast<A>(average);
  out.scale[c] = static_cast<A>(inverse * weight.load_or(c, 1.0));
  out.shift[c] = bias.load_or(c, A(0));
}

template <class A>
__global__ void running_statistics_kernel(std::int64_t columns, AnyFloat weight, AnyFloat bias,
                                          AnyFloat mean, AnyFloat variance, double eps,
                                          ChannelScale<A> out) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= columns) return;
  const double inverse = 1.0 / sqrt(variance.load<double>(c) + eps);
  out.mean[c] = mean.load<A>(c);
  out.scale[c] = static_cast<A>(inverse * weight.load_or(c, 1.0));
  out.shift[c] = bias.load_or(c, A(0));
}

/// y[i] = f(column, x[i]) over n elements of rows of `columns`; other inputs are read by f at i.
template <class T, class F>
__global__ void channel_map_kernel(std::int64_t n, std::int64_t columns, bool packs, F f,
                                   const T* x, T* y) {
  constexpr int N = pack_width<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x * N;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; i < n;
       i += step) {
    std::int64_t column = i - divide(i, columns) * columns;
    const bool whole = packs && i + N <= n;
    Packed<T, N> pack;
    if (whole) pack = load_pack<N>(x + i);
    for (int k = 0; k < N && i + k < n; ++k) {
      const T value = narrow<T>(f(column, i + k, widen(whole ? pack[k] : x[i + k])));
      if (whole) {
        pack[k] = value;
      } else {
        y[i + k] = value;
      }
      column = column + 1 == columns ? 0 : column + 1;
    }
    if (whole) store_pack<N>(y + i, pack);
  }
}

template <class A>
struct ChannelNormalize {
  ChannelScale<A> channel;
  bool relu;
  __device__ A operator()(std::int64_t c, std::int64_t, A x) const {
    const A y = math::fma(x - channel.mean[c], channel.scale[c], channel.shift[c]);
    return relu && y < A(0) ? A(0) : y;
  }
};

template <class T>
struct BatchNormTerms {  // {g xhat, g}, g = dy where the ReLU let it pass
  using A = Arithmetic<T>;
  const T* x;
  const T* y;  // nullptr: no ReLU
  const T* dy;
  AnyFloat mean, rstd;
  std::int64_t columns;

  __device__ A gradient(std::int64_t i, A dy_value) const {
    return y != nullptr && !(widen(y[i]) > A(0)) ? A(0) : dy_value;
  }
  __device__ A normalized(std::int64_t i, std::int64_t c) const {
    return (widen(x[i]) - mean.load<A>(c)) * rstd.load<A>(c);
  }
  __device__ Two<A> operator()(std::int64_t row, std::int64_t c) const {
    const std::int64_t i = row * columns + c;
    const A g = gradient(i, widen(dy[i]));
    return {g * normalized(i, c), g};
  }
};

/// Per channel: the means that dx subtracts (0 with constant statistics) and its factor.
template <class A>
struct ChannelGradient {
  A* mean_dot;
  A* mean_g;
  A* factor;
};

template <class A>
__global__ void channel_gradients_kernel(ColumnSplit split, const A* partial, AnyFloat weight,
                                         AnyFloat rstd, AnyFloat dweight, AnyFloat dbias,
                                         bool batch_statistics, bool accumulate,
                                         ChannelGradient<A> out) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= split.columns) return;
  const Two<A> total = column_total(split, partial, c);
  if (dweight.present()) dweight.store(c, total.first, accumulate);
  if (dbias.present()) dbias.store(c, total.second, accumulate);
  const A n = static_cast<A>(split.rows);
  out.mean_dot[c] = batch_statistics ? total.first / n : A(0);
  out.mean_g[c] = batch_statistics ? total.second / n : A(0);
  out.factor[c] = rstd.load<A>(c) * weight.load_or(c, A(1));
}

template <class T>
struct BatchNormGradient {
  using A = Arithmetic<T>;
  BatchNormTerms<T> terms;
  ChannelGradient<A> channel;
  __device__ A operator()(std::int64_t c, std::int64_t i, A dy) const {
    const A g = terms.gradient(i, dy);
    return channel.factor[c] *
           (g - channel.mean_g[c] - terms.normalized(i, c) * channel.mean_dot[c]);
  }
};

}  // namespace cairn::kernels::cuda
