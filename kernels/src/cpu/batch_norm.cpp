// Batch norm over a matrix [rows, C]: x [N, C], or the pixels of channels-last images. Vectors run
// over the channels, so no sum crosses lanes. Rows are cut into chunks whose size depends on C
// alone; a chunk's sums are f32 (relative to the chunk's first row, which keeps them small), chunks
// are combined in double and in order: the same bits for any number of threads. Reads: forward x
// twice, backward x, dy (and y with relu) twice; writes y, or dx, once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/batch_norm.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/channels_last.h"
#include "cpu/cpu_backend.h"
#include "cpu/element.h"
#include "cpu/simd.h"

#ifndef CAIRN_KERNELS_CPU_BATCH_NORM_TYPES_
#define CAIRN_KERNELS_CPU_BATCH_NORM_TYPES_
namespace cairn::kernels {

/// Rows of C contiguous channels.
struct ChannelRows {
  DType dtype;
  std::int64_t rows, channels;

  std::int64_t chunk_rows() const { return std::clamp<std::int64_t>(32768 / channels, 16, 512); }
  std::int64_t chunks() const { return (rows + chunk_rows() - 1) / chunk_rows(); }
};

using Channels = std::vector<double>;  // one value a channel

/// Two sums over the rows, for each channel.
struct ChannelSums {
  Channels first, second;
};

struct BatchNormImages {
  const void *x, *y, *dy;  // y: null without relu
};

}  // namespace cairn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// Per-channel values in the precision T is computed in.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
std::vector<Acc<T>> narrowed(const Channels& values) {
  return std::vector<Acc<T>>(values.begin(), values.end());
}

template <class V>
struct Two {
  V first, second;
};

/// sums += term(io, row, c) over the rows, four at a time.
template <class V, class A, class Term>
HWY_INLINE void add_rows(std::int64_t rows, std::int64_t channels, A* first, A* second,
                         const Term& term) {
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    for_vectors<V>(channels, [&](auto io, std::int64_t c) HWY_ATTR {
      const Two<V> a = term(io, r, c), b = term(io, r + 1, c);
      const Two<V> p = term(io, r + 2, c), q = term(io, r + 3, c);
      io.store(io.load(first + c) + ((a.first + b.first) + (p.first + q.first)), first + c);
      io.store(io.load(second + c) + ((a.second + b.second) + (p.second + q.second)), second + c);
    });
  }
  for (; r < rows; ++r) {
    for_vectors<V>(channels, [&](auto io, std::int64_t c) HWY_ATTR {
      const Two<V> a = term(io, r, c);
      io.store(io.load(first + c) + a.first, first + c);
      io.store(io.load(second + c) + a.second, second + c);
    });
  }
}

/// Sums of d = x - (first row) and of d^2.
template <class T>
void moments_of_chunk(const T* x, std::int64_t rows, std::int64_t channels, Acc<T>* sum,
                      Acc<T>* square) {
  using V = Compute<T>;
  add_rows<V>(rows, channels, sum, square, [&](auto io, std::int64_t r, std::int64_t c) HWY_ATTR {
    const V d = io.load(x + r * channels + c) - io.load(x + c);
    return Two<V>{d, d * d};
  });
}

/// dy where the ReLU let the value through.
template <class T, class Io>
HWY_INLINE Compute<T> masked(Io io, const T* y, const T* dy, std::int64_t at) {
  using V = Compute<T>;
  const V g = io.load(dy + at);
  return y == nullptr ? g : select(io.load(y + at) > V(0.0), g, V(0.0));
}

/// Sums of g = dy (masked) and of g (x - mean).
template <class T>
void gradients_of_chunk(const T* x, const T* y, const T* dy, const Acc<T>* mean, std::int64_t rows,
                        std::int64_t channels, Acc<T>* sum, Acc<T>* dot) {
  using V = Compute<T>;
  add_rows<V>(rows, channels, sum, dot, [&](auto io, std::int64_t r, std::int64_t c) HWY_ATTR {
    const std::int64_t at = r * channels + c;
    const V g = masked(io, y, dy, at);
    return Two<V>{g, g * (io.load(x + at) - io.load(mean + c))};
  });
}

/// Calls chunk(first row, rows, first sums, second sums) for all chunks; the sums start at 0.
/// Returns [chunk][2][channel].
template <class A, class Chunk>
std::vector<A> chunk_sums(const ChannelRows& m, const Chunk& chunk) {
  const std::int64_t step = m.chunk_rows(), channels = m.channels;
  std::vector<A> sums(static_cast<std::size_t>(m.chunks() * 2 * channels), A(0));
  core::parallel_for(m.rows, step, [&](std::int64_t begin, std::int64_t end) {
    A* first = sums.data() + begin / step * 2 * channels;
    chunk(begin, end - begin, first, first + channels);
  });
  return sums;
}

/// Mean and sum of squared deviations of each channel. Chunks combine as in Chan, Golub & LeVeque
/// 1979.
void BatchMoments(const ChannelRows& m, const void* data, ChannelSums& moments) {
  core::dispatch_floating(m.dtype, "batch_norm", [&](auto zero) {
    using T = decltype(zero);
    const T* x = static_cast<const T*>(data);
    const auto sums = chunk_sums<Acc<T>>(
        m, [&](std::int64_t begin, std::int64_t rows, Acc<T>* sum, Acc<T>* square) {
          moments_of_chunk(x + begin * m.channels, rows, m.channels, sum, square);
        });
    for (std::int64_t k = 0, row = 0; k < m.chunks(); ++k, row += m.chunk_rows()) {
      const double n = static_cast<double>(std::min(m.chunk_rows(), m.rows - row));
      const double before = static_cast<double>(row), part = n / (before + n);
      const Acc<T>* sum = sums.data() + k * 2 * m.channels;
      const T* pivot = x + row * m.channels;
      for (std::int64_t c = 0; c < m.channels; ++c) {
        const auto i = static_cast<std::size_t>(c);
        const double d = sum[c], square = sum[m.channels + c];
        const double shift = static_cast<double>(static_cast<Acc<T>>(pivot[c])) + d / n;
        const double delta = shift - moments.first[i];
        moments.first[i] += delta * part;
        moments.second[i] += std::max(square - d * d / n, 0.0) + delta * delta * before * part;
      }
    }
  });
}

/// Sums of g and of g (x - mean) of each channel.
void BatchGradientSums(const ChannelRows& m, const BatchNormImages& images, const Channels& means,
                       ChannelSums& totals) {
  core::dispatch_floating(m.dtype, "batch_norm_backward", [&](auto zero) {
    using T = decltype(zero);
    const auto mean = narrowed<T>(means);
    const auto sums =
        chunk_sums<Acc<T>>(m, [&](std::int64_t begin, std::int64_t rows, Acc<T>* sum, Acc<T>* dot) {
          const std::int64_t at = begin * m.channels;
          const T* y = images.y == nullptr ? nullptr : static_cast<const T*>(images.y) + at;
          gradients_of_chunk(static_cast<const T*>(images.x) + at, y,
                             static_cast<const T*>(images.dy) + at, mean.data(), rows, m.channels,
                             sum, dot);
        });
    for (std::int64_t k = 0; k < m.chunks(); ++k) {
      const Acc<T>* sum = sums.data() + k * 2 * m.channels;
      for (std::int64_t c = 0; c < m.channels; ++c) {
        totals.first[static_cast<std::size_t>(c)] += sum[c];
        totals.second[static_cast<std::size_t>(c)] += sum[m.channels + c];
      }
    }
  });
}

/// y = (x - mean) scale + bias, then the ReLU.
void BatchApply(const ChannelRows& m, const void* data, void* out, const Channels& means,
                const Channels& scales, const Channels& biases, bool relu) {
  core::dispatch_floating(m.dtype, "batch_norm", [&](auto zero) {
    using T = decltype(zero);
    using V = Compute<T>;
    const auto mean = narrowed<T>(means), scale = narrowed<T>(scales), bias = narrowed<T>(biases);
    core::parallel_for(m.rows, m.chunk_rows(), [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
      for (std::int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(data) + r * m.channels;
        T* y = static_cast<T*>(out) + r * m.channels;
        for_vectors<V>(m.channels, [&](auto io, std::int64_t c) HWY_ATTR {
          const V v = fma(io.load(x + c) - io.load(mean.data() + c), io.load(scale.data() + c),
                          io.load(bias.data() + c));
          io.store(relu ? select(v < V(0.0), V(0.0), v) : v, y + c);
        });
      }
    });
  });
}

/// dx = scale (g - offset - (x - mean) slope).
void BatchGradientApply(const ChannelRows& m, const BatchNormImages& images, void* out,
                        const Channels& means, const Channels& scales, const Channels& offsets,
                        const Channels& slopes) {
  core::dispatch_floating(m.dtype, "batch_norm_backward", [&](auto zero) {
    using T = decltype(zero);
    using V = Compute<T>;
    const auto mean = narrowed<T>(means), scale = narrowed<T>(scales);
    const auto offset = narrowed<T>(offsets), slope = narrowed<T>(slopes);
    core::parallel_for(m.rows, m.chunk_rows(), [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t at = r * m.channels;
        const T* x = static_cast<const T*>(images.x) + at;
        const T* y = images.y == nullptr ? nullptr : static_cast<const T*>(images.y) + at;
        const T* dy = static_cast<const T*>(images.dy) + at;
        T* dx = static_cast<T*>(out) + at;
        for_vectors<V>(m.channels, [&](auto io, std::int64_t c) HWY_ATTR {
          const V d = io.load(x + c) - io.load(mean.data() + c);
          const V g = masked(io, y, dy, c) - io.load(offset.data() + c);
          io.store(io.load(scale.data() + c) * (g - d * io.load(slope.data() + c)), dx + c);
        });
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(BatchMoments);
HWY_EXPORT(BatchGradientSums);
HWY_EXPORT(BatchApply);
HWY_EXPORT(BatchGradientApply);

namespace {

ChannelRows rows_of(const TensorView& x) {
  return {x.dtype, x.numel() / x.size(1), x.size(1)};
}

// [N, C] as an image of one pixel.
TensorView as_image(const TensorView& x) {
  return x.dims() == 2 ? x.unsqueeze(2).unsqueeze(3) : x;
}

Channels channels_or(const TensorView& view, std::int64_t channels, double absent) {
  Channels values(static_cast<std::size_t>(channels), absent);
  if (!view.defined()) return values;
  for (std::int64_t c = 0; c < channels; ++c) {
    values[static_cast<std::size_t>(c)] = cpu::element_at(view, c * view.strides[0]);
  }
  return values;
}

// view = keep * view + values; does nothing where it is undefined.
void write_channels(const Channels& values, const TensorView& view, double keep) {
  if (!view.defined()) return;
  for (std::size_t c = 0; c < values.size(); ++c) {
    const std::int64_t at = static_cast<std::int64_t>(c) * view.strides[0];
    const double before = keep == 0.0 ? 0.0 : keep * cpu::element_at(view, at);
    cpu::set_element(view, at, before + values[c]);
  }
}

Channels scaled(const Channels& values, double factor) {
  Channels result = values;
  for (double& v : result) v *= factor;
  return result;
}

Channels products(const Channels& a, const Channels& b) {
  Channels result = a;
  for (std::size_t i = 0; i < a.size(); ++i) result[i] *= b[i];
  return result;
}

Channels rstd_of(const Channels& variances, double eps) {
  Channels result = variances;
  for (double& v : result) v = 1.0 / std::sqrt(v + eps);
  return result;
}

void normalise(const Backend& backend, const TensorView& x, const Temporary& from,
               const TensorView& weight, const TensorView& bias, const Channels& mean,
               const Channels& rstd, const TensorView& y, bool relu) {
  const ChannelRows m = rows_of(x);
  const Channels scale = products(rstd, channels_or(weight, m.channels, 1.0));
  const Temporary to = image_output(as_image(y));
  HWY_DYNAMIC_DISPATCH(BatchApply)
  (m, from.view.data, to.view.data, mean, scale, channels_or(bias, m.channels, 0.0), relu);
  finish_output(backend, to, as_image(y));
}

}  // namespace

void CpuBackend::batch_norm(View x, View weight, View bias, View running_mean, View running_var,
                            View y, View mean, View rstd, const BatchNormOptions& options) const {
  const ChannelRows m = rows_of(x);
  const auto n = static_cast<double>(m.rows);
  const Temporary from = image_input(*this, as_image(x));
  ChannelSums moments{Channels(static_cast<std::size_t>(m.channels)),
                      Channels(static_cast<std::size_t>(m.channels))};
  HWY_DYNAMIC_DISPATCH(BatchMoments)(m, from.view.data, moments);
  const Channels inverse = rstd_of(scaled(moments.second, 1.0 / n), options.eps);
  write_channels(moments.first, mean, 0.0);
  write_channels(inverse, rstd, 0.0);
  const double momentum = options.momentum;
  write_channels(scaled(moments.first, momentum), running_mean, 1.0 - momentum);
  write_channels(scaled(moments.second, momentum / (n - 1.0)), running_var, 1.0 - momentum);
  normalise(*this, x, from, weight, bias, moments.first, inverse, y, options.relu);
}

void CpuBackend::batch_norm_eval(View x, View weight, View bias, View running_mean,
                                 View running_var, View y, const BatchNormOptions& options) const {
  const std::int64_t channels = x.size(1);
  const Channels inverse = rstd_of(channels_or(running_var, channels, 1.0), options.eps);
  normalise(*this, x, image_input(*this, as_image(x)), weight, bias,
            channels_or(running_mean, channels, 0.0), inverse, y, options.relu);
}

void CpuBackend::batch_norm_backward(View x, View y, View weight, View mean, View rstd, View dy,
                                     View dx, View dweight, View dbias,
                                     const BatchNormOptions& options, bool accumulate) const {
  const ChannelRows m = rows_of(x);
  const auto n = static_cast<double>(m.rows);
  const auto count = static_cast<std::size_t>(m.channels);
  const Temporary from = image_input(*this, as_image(x)),
                  gradient = image_input(*this, as_image(dy));
  const Temporary output = options.relu ? image_input(*this, as_image(y)) : Temporary{};
  const BatchNormImages images{from.view.data, output.view.data, gradient.view.data};
  const Channels means = channels_or(mean, m.channels, 0.0),
                 inverse = channels_or(rstd, m.channels, 1.0);
  ChannelSums sums{Channels(count), Channels(count)};
  if (options.training || dweight.defined() || dbias.defined()) {
    HWY_DYNAMIC_DISPATCH(BatchGradientSums)(m, images, means, sums);
  }
  const Channels dots = products(sums.second, inverse);  // sums of g * normalised x
  write_channels(dots, dweight, accumulate ? 1.0 : 0.0);
  write_channels(sums.first, dbias, accumulate ? 1.0 : 0.0);
  if (!dx.defined()) return;
  const double share = options.training ? 1.0 / n : 0.0;
  const Temporary to = image_output(as_image(dx));
  HWY_DYNAMIC_DISPATCH(BatchGradientApply)
  (m, images, to.view.data, means, products(inverse, channels_or(weight, m.channels, 1.0)),
   scaled(sums.first, share), scaled(products(dots, inverse), share));
  finish_output(*this, to, as_image(dx));
}

void CpuBackend::batch_norm_moments(View x, View part) const {
  const ChannelRows m = rows_of(x);
  const Temporary from = image_input(*this, as_image(x));
  ChannelSums moments{Channels(static_cast<std::size_t>(m.channels)),
                      Channels(static_cast<std::size_t>(m.channels))};
  HWY_DYNAMIC_DISPATCH(BatchMoments)(m, from.view.data, moments);
  write_channels(moments.first, part.slice(0, 0, m.channels), 0.0);
  write_channels(moments.second, part.slice(0, m.channels, 2 * m.channels), 0.0);
  cpu::set_element(part, 2 * m.channels * part.strides[0], static_cast<double>(m.rows));
}

void CpuBackend::batch_norm_merge(View parts, View running_mean, View running_var, View mean,
                                  View var, View rstd, View count,
                                  const BatchNormOptions& options) const {
  const std::int64_t channels = mean.numel();
  ChannelSums total{Channels(static_cast<std::size_t>(channels)),
                    Channels(static_cast<std::size_t>(channels))};
  double before = 0.0;
  for (std::int64_t r = 0; r < parts.shape[0]; ++r) {
    const auto* part = parts.as<float>() + r * parts.shape[1];
    const double n = part[2 * channels];
    if (n == 0.0) continue;
    const double share = n / (before + n);
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto i = static_cast<std::size_t>(c);
      const double delta = part[c] - total.first[i];
      total.first[i] += delta * share;
      total.second[i] += part[channels + c] + delta * delta * before * share;
    }
    before += n;
  }
  const Channels variance = scaled(total.second, before > 0.0 ? 1.0 / before : 0.0);
  write_channels(total.first, mean, 0.0);
  write_channels(variance, var, 0.0);
  write_channels(rstd_of(variance, options.eps), rstd, 0.0);
  cpu::set_element(count, 0, before);
  if (before == 0.0) return;
  const double momentum = options.momentum, free = std::max(before - 1.0, 1.0);
  write_channels(scaled(total.first, momentum), running_mean, 1.0 - momentum);
  write_channels(scaled(total.second, momentum / free), running_var, 1.0 - momentum);
}

void CpuBackend::batch_norm_backward_data(View x, View y, View weight, View mean, View rstd,
                                          View dy, View mean_g, View mean_gx, View dx,
                                          const BatchNormOptions& options) const {
  const ChannelRows m = rows_of(x);
  const Temporary from = image_input(*this, as_image(x)),
                  gradient = image_input(*this, as_image(dy));
  const Temporary output = options.relu ? image_input(*this, as_image(y)) : Temporary{};
  const BatchNormImages images{from.view.data, output.view.data, gradient.view.data};
  const Channels inverse = channels_or(rstd, m.channels, 1.0);
  const Temporary to = image_output(as_image(dx));
  HWY_DYNAMIC_DISPATCH(BatchGradientApply)
  (m, images, to.view.data, channels_or(mean, m.channels, 0.0),
   products(inverse, channels_or(weight, m.channels, 1.0)), channels_or(mean_g, m.channels, 0.0),
   products(channels_or(mean_gx, m.channels, 0.0), inverse));
  finish_output(*this, to, as_image(dx));
}

}  // namespace cairn::kernels
#endif
