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
  static constexpr int kWidth = pack_width<T>;
  using Constants = Packed<A, kWidth>;  // the first row
  const T* x;
  std::int64_t columns;

  __device__ Constants constants(std::int64_t column) const {
    return widened<A>(load_pack<kWidth>(x + column));
  }
  __device__ Two<A> value(std::int64_t row, std::int64_t column) const {
    const A d = widen(x[row * columns + column]) - widen(x[column]);
    return {d, d * d};
  }
  __device__ void add(const Constants& first, std::int64_t row, std::int64_t column,
                      Packed<Two<A>, kWidth>& sums) const {
    const auto in = load_pack<kWidth>(x + row * columns + column);
    SIMT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      const A d = widen(in[k]) - first[k];
      sums[k] = sums[k] + Two<A>{d, d * d};
    }
  }
};

/// What each channel needs in the elementwise pass: y = (x - mean) scale + shift.
template <class A>
struct ChannelScale {
  A* mean;
  A* scale;
  A* shift;

  struct One {
    A mean, scale, shift;
  };
  template <int N>
  struct Pack {
    Packed<A, N> mean, scale, shift;
  };
  __device__ One one(std::int64_t c) const { return {mean[c], scale[c], shift[c]}; }
  template <int N>
  __device__ Pack<N> pack(std::int64_t c) const {
    return {load_pack<N>(mean + c), load_pack<N>(scale + c), load_pack<N>(shift + c)};
  }
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

/// part [2 C + 1]: means, sums of squared deviations, rows.
template <class T>
__global__ void batch_moments_kernel(ColumnSplit split, const Arithmetic<T>* partial, const T* x,
                                     float* part) {
  using A = Arithmetic<T>;
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= split.columns) return;
  const Two<A> total = column_total(split, partial, c);
  const double n = static_cast<double>(split.rows);
  const double shifted = static_cast<double>(total.first) / n;
  const double squares = static_cast<double>(total.second) - shifted * shifted * n;
  part[c] = static_cast<float>(static_cast<double>(widen(x[c])) + shifted);
  part[split.columns + c] = static_cast<float>(fmax(squares, 0.0));
  if (c == 0) part[2 * split.columns] = static_cast<float>(n);
}

/// parts [R, 2 C + 1] joined in order: Chan, Golub & LeVeque 1979. One thread stands for the count
/// too, where there is no channel as well.
static __global__ void merge_moments_kernel(std::int64_t parts, std::int64_t columns,
                                            const float* part, AnyFloat running_mean,
                                            AnyFloat running_var, double eps, double momentum,
                                            AnyFloat mean, AnyFloat var, AnyFloat rstd,
                                            float* count) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= columns && c > 0) return;
  double before = 0.0, average = 0.0, squares = 0.0;
  for (std::int64_t r = 0; r < parts; ++r) {
    const float* one = part + r * (2 * columns + 1);
    const double n = one[2 * columns];
    if (n == 0.0) continue;
    if (c < columns) {
      const double share = n / (before + n), delta = one[c] - average;
      average += delta * share;
      squares += one[columns + c] + delta * delta * before * share;
    }
    before += n;
  }
  if (c == 0) count[0] = static_cast<float>(before);
  if (c >= columns) return;
  const double variance = before > 0.0 ? squares / before : 0.0;
  mean.store(c, average);
  var.store(c, variance);
  rstd.store(c, 1.0 / sqrt(variance + eps));
  if (before == 0.0) return;
  if (running_mean.present()) {
    const double old = running_mean.load<double>(c);
    running_mean.store(c, (1.0 - momentum) * old + momentum * average);
  }
  if (running_var.present()) {
    const double old = running_var.load<double>(c);
    running_var.store(c, (1.0 - momentum) * old + momentum * squares / fmax(before - 1.0, 1.0));
  }
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

/// y = f(x) over rows of channels. packs: rows are whole packs, and aligned; then a thread stays
/// with its channels, and looks up what belongs to them once.
template <class T, class F>
__global__ void channel_map_kernel(std::int64_t rows, std::int64_t columns, bool packs, F f,
                                   const T* x, T* y) {
  constexpr int N = pack_width<T>;
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (packs) {
    const std::int64_t row_packs = columns / N, lines = divide(threads, row_packs);
    const std::int64_t line = divide(thread, row_packs), column = (thread - line * row_packs) * N;
    if (line >= lines) return;
    const auto channel = f.channel.template pack<N>(column);
    for (std::int64_t row = line; row < rows; row += lines) {
      const std::int64_t i = row * columns + column;
      const auto values = f.pack(channel, i, widened<Arithmetic<T>>(load_pack<N>(x + i)));
      store_pack<N>(y + i, narrowed<T>(values));
    }
    return;
  }
  for (std::int64_t i = thread; i < rows * columns; i += threads) {
    y[i] = narrow<T>(f.one(f.channel.one(i - divide(i, columns) * columns), i, widen(x[i])));
  }
}

template <class A>
struct ChannelNormalize {
  ChannelScale<A> channel;
  bool relu;
  __device__ A value(A x, A mean, A scale, A shift) const {
    const A y = math::fma(x - mean, scale, shift);
    return relu && y < A(0) ? A(0) : y;
  }
  template <class C>
  __device__ A one(const C& c, std::int64_t, A x) const {
    return value(x, c.mean, c.scale, c.shift);
  }
  template <class C, int N>
  __device__ Packed<A, N> pack(const C& c, std::int64_t, Packed<A, N> x) const {
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) x[k] = value(x[k], c.mean[k], c.scale[k], c.shift[k]);
    return x;
  }
};

template <class T>
struct BatchNormTerms {  // {g xhat, g}, g = dy where the ReLU let it pass
  using A = Arithmetic<T>;
  static constexpr int kWidth = pack_width<T>;
  struct Constants {
    Packed<A, kWidth> mean, rstd;
  };
  const T* x;
  const T* y;  // nullptr: no ReLU
  const T* dy;
  const float* mean;
  const float* rstd;
  std::int64_t columns;

  __device__ A gradient(std::int64_t i, A dy_value) const {
    return y != nullptr && !(widen(y[i]) > A(0)) ? A(0) : dy_value;
  }
  __device__ Packed<A, kWidth> gradients(std::int64_t i, Packed<A, kWidth> g) const {
    if (y == nullptr) return g;
    const auto result = load_pack<kWidth>(y + i);
    SIMT_UNROLL
    for (int k = 0; k < kWidth; ++k) g[k] = widen(result[k]) > A(0) ? g[k] : A(0);
    return g;
  }
  __device__ Constants constants(std::int64_t column) const {
    Constants c;
    for (int k = 0; k < kWidth; ++k) c.mean[k] = mean[column + k], c.rstd[k] = rstd[column + k];
    return c;
  }
  __device__ Two<A> value(std::int64_t row, std::int64_t c) const {
    const std::int64_t i = row * columns + c;
    const A g = gradient(i, widen(dy[i]));
    return {g * (widen(x[i]) - mean[c]) * rstd[c], g};
  }
  __device__ void add(const Constants& c, std::int64_t row, std::int64_t column,
                      Packed<Two<A>, kWidth>& sums) const {
    const std::int64_t i = row * columns + column;
    const auto in = load_pack<kWidth>(x + i);
    const auto g = gradients(i, widened<A>(load_pack<kWidth>(dy + i)));
    SIMT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      sums[k] = sums[k] + Two<A>{g[k] * (widen(in[k]) - c.mean[k]) * c.rstd[k], g[k]};
    }
  }
};

/// Per channel: dx = factor (g - mean_g - (x - mean) slope); mean_g and slope are 0 with constant
/// statistics.
template <class A>
struct ChannelGradient {
  A* mean;
  A* slope;
  A* mean_g;
  A* factor;

  struct One {
    A mean, slope, mean_g, factor;
  };
  template <int N>
  struct Pack {
    Packed<A, N> mean, slope, mean_g, factor;
  };
  __device__ One one(std::int64_t c) const { return {mean[c], slope[c], mean_g[c], factor[c]}; }
  template <int N>
  __device__ Pack<N> pack(std::int64_t c) const {
    return {load_pack<N>(mean + c), load_pack<N>(slope + c), load_pack<N>(mean_g + c),
            load_pack<N>(factor + c)};
  }
};

template <class A>
__global__ void channel_gradients_kernel(ColumnSplit split, const A* partial, AnyFloat weight,
                                         const float* mean, const float* rstd, AnyFloat dweight,
                                         AnyFloat dbias, bool batch_statistics, bool accumulate,
                                         ChannelGradient<A> out) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= split.columns) return;
  const Two<A> total = column_total(split, partial, c);
  if (dweight.present()) dweight.store(c, total.first, accumulate);
  if (dbias.present()) dbias.store(c, total.second, accumulate);
  const A n = static_cast<A>(split.rows);
  out.mean[c] = mean[c];
  out.slope[c] = batch_statistics ? rstd[c] * (total.first / n) : A(0);
  out.mean_g[c] = batch_statistics ? total.second / n : A(0);
  out.factor[c] = rstd[c] * weight.load_or(c, A(1));
}

/// The same with means that are known.
template <class A>
__global__ void given_gradients_kernel(std::int64_t columns, AnyFloat weight, const float* mean,
                                       const float* rstd, const float* mean_g, const float* mean_gx,
                                       ChannelGradient<A> out) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= columns) return;
  out.mean[c] = mean[c];
  out.slope[c] = rstd[c] * mean_gx[c];
  out.mean_g[c] = mean_g[c];
  out.factor[c] = rstd[c] * weight.load_or(c, A(1));
}

template <class T>
struct BatchNormGradient {
  using A = Arithmetic<T>;
  BatchNormTerms<T> terms;
  ChannelGradient<A> channel;

  template <class C>
  __device__ A one(const C& c, std::int64_t i, A dy) const {
    const A g = terms.gradient(i, dy);
    return c.factor * (g - c.mean_g - (widen(terms.x[i]) - c.mean) * c.slope);
  }
  template <class C, int N>
  __device__ Packed<A, N> pack(const C& c, std::int64_t i, const Packed<A, N>& dy) const {
    const auto in = load_pack<N>(terms.x + i);
    auto g = terms.gradients(i, dy);
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) {
      g[k] = c.factor[k] * (g[k] - c.mean_g[k] - (widen(in[k]) - c.mean[k]) * c.slope[k]);
    }
    return g;
  }
};

}  // namespace cairn::kernels::cuda
