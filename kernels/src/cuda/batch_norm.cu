#include "cuda/batch_norm.cuh"

#include "cuda/contiguous.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

constexpr auto kChannelsLast = StorageOrder::channels_last;

/// Several rows a thread, so that looking up the channels' constants costs little; a thread for
/// each pack of a row at least.
template <class T, class F>
void channel_map(const Queue& queue, std::int64_t columns, F f, const Input& x, const Output& y,
                 bool packs) {
  constexpr int N = pack_width<T>;
  const std::int64_t n = y.view().numel(), row_packs = ceil_div(columns, N);
  Grid grid = grid_for(ceil_div(n, 4 * N));
  grid.blocks = std::max(grid.blocks, ceil_div(row_packs, kThreads));
  launch(queue, grid, channel_map_kernel<T, F>, n / columns, columns,
         packs && columns % N == 0 && packs_aligned(x.as<T>(), y.as<T>()), f, x.as<T>(), y.as<T>());
}

Grid grid_for_channels(std::int64_t columns) {
  return {ceil_div(columns, kThreads), kThreads};
}

/// Four values a channel.
template <class A>
struct ChannelBuffers {
  ChannelBuffers(const Queue& queue, std::int64_t columns)
      : memory(queue, 4 * columns),
        a(memory.data()),
        b(memory.data() + columns),
        c(memory.data() + 2 * columns),
        d(memory.data() + 3 * columns) {}
  Buffer<A> memory;
  A *a, *b, *c, *d;
};

}  // namespace

void CudaBackend::batch_norm(View x, View weight, View bias, View running_mean, View running_var,
                             View y, View mean, View rstd, const BatchNormOptions& options) const {
  if (x.numel() == 0) return;
  const Queue queue("batch_norm", x.device);
  const Input in(*this, queue, x, kChannelsLast);
  const Output out(*this, queue, y, kChannelsLast);
  const std::int64_t columns = x.shape[1];
  const ColumnSplit split = ColumnSplit::of(x.numel() / columns, columns, x.dtype);
  core::dispatch_floating(x.dtype, "batch_norm", [&](auto type) {
    using T = decltype(type);
    using A = Arithmetic<T>;
    const ChannelBuffers<A> channel(queue, columns);
    const ChannelScale<A> scale{channel.a, channel.b, channel.c};
    const auto partial = column_sums<A>(queue, split, packs_aligned(in.as<T>()),
                                        DeviationTerms<T>{in.as<T>(), columns});
    launch(queue, grid_for_channels(columns), batch_statistics_kernel<T>, split, partial.data(),
           in.as<T>(), AnyFloat(weight), AnyFloat(bias), AnyFloat(running_mean),
           AnyFloat(running_var), options.eps, options.momentum, AnyFloat(mean), AnyFloat(rstd),
           scale);
    channel_map<T>(queue, columns, ChannelNormalize<A>{scale, options.relu}, in, out, true);
  });
  out.finish();
}

void CudaBackend::batch_norm_eval(View x, View weight, View bias, View running_mean,
                                  View running_var, View y, const BatchNormOptions& options) const {
  if (x.numel() == 0) return;
  const Queue queue("batch_norm_eval", x.device);
  const Input in(*this, queue, x, kChannelsLast);
  const Output out(*this, queue, y, kChannelsLast);
  const std::int64_t columns = x.shape[1];
  core::dispatch_floating(x.dtype, "batch_norm_eval", [&](auto type) {
    using T = decltype(type);
    using A = Arithmetic<T>;
    const ChannelBuffers<A> channel(queue, columns);
    const ChannelScale<A> scale{channel.a, channel.b, channel.c};
    launch(queue, grid_for_channels(columns), running_statistics_kernel<A>, columns,
           AnyFloat(weight), AnyFloat(bias), AnyFloat(running_mean), AnyFloat(running_var),
           options.eps, scale);
    channel_map<T>(queue, columns, ChannelNormalize<A>{scale, options.relu}, in, out, true);
  });
  out.finish();
}

void CudaBackend::batch_norm_backward(View x, View y, View weight, View mean, View rstd, View dy,
                                      View dx, View dweight, View dbias,
                                      const BatchNormOptions& options, bool accumulate) const {
  const Queue queue("batch_norm_backward", x.device);
  const Input in(*this, queue, x, kChannelsLast), grad(*this, queue, dy, kChannelsLast);
  const Input result(*this, queue, options.relu ? y : TensorView(), kChannelsLast);
  const Input means(*this, queue, mean), rstds(*this, queue, rstd);
  const Output out(*this, queue, dx, kChannelsLast);
  const std::int64_t columns = x.shape[1], rows = columns == 0 ? 0 : x.numel() / columns;
  if (columns == 0) return;
  const ColumnSplit split = ColumnSplit::of(rows, columns, x.dtype);
  core::dispatch_floating(x.dtype, "batch_norm_backward", [&](auto type) {
    using T = decltype(type);
    using A = Arithmetic<T>;
    const ChannelBuffers<A> channel(queue, columns);
    const ChannelGradient<A> gradient{channel.a, channel.b, channel.c, channel.d};
    const BatchNormTerms<T> terms{in.as<T>(),        result.as<T>(),    grad.as<T>(),
                                  means.as<float>(), rstds.as<float>(), columns};
    const bool packs = packs_aligned(terms.x, terms.y, terms.dy);
    const auto partial = column_sums<A>(queue, split, packs, terms);
    launch(queue, grid_for_channels(columns), channel_gradients_kernel<A>, split, partial.data(),
           AnyFloat(weight), terms.mean, terms.rstd, AnyFloat(dweight), AnyFloat(dbias),
           options.training, accumulate, gradient);
    if (rows == 0 || !dx.defined()) return;
    channel_map<T>(queue, columns, BatchNormGradient<T>{terms, gradient}, grad, out, packs);
  });
  out.finish();
}

void CudaBackend::batch_norm_moments(View x, View part) const {
  const Queue queue("batch_norm_moments", x.device);
  const Input in(*this, queue, x, kChannelsLast);
  const Output out(*this, queue, part);
  const std::int64_t columns = x.shape[1];
  const ColumnSplit split = ColumnSplit::of(x.numel() / columns, columns, x.dtype);
  core::dispatch_floating(x.dtype, "batch_norm_moments", [&](auto type) {
    using T = decltype(type);
    const auto partial = column_sums<Arithmetic<T>>(queue, split, packs_aligned(in.as<T>()),
                                                    DeviationTerms<T>{in.as<T>(), columns});
    launch(queue, grid_for_channels(columns), batch_moments_kernel<T>, split, partial.data(),
           in.as<T>(), out.as<float>());
  });
  out.finish();
}

void CudaBackend::batch_norm_merge(View parts, View running_mean, View running_var, View mean,
                                   View var, View rstd, View count,
                                   const BatchNormOptions& options) const {
  const Queue queue("batch_norm_merge", parts.device);
  const std::int64_t columns = mean.numel();
  launch(queue, grid_for_channels(std::max<std::int64_t>(columns, 1)), merge_moments_kernel,
         parts.shape[0], columns, parts.as<const float>(), AnyFloat(running_mean),
         AnyFloat(running_var), options.eps, options.momentum, AnyFloat(mean), AnyFloat(var),
         AnyFloat(rstd), count.as<float>());
}

void CudaBackend::batch_norm_backward_data(View x, View y, View weight, View mean, View rstd,
                                           View dy, View mean_g, View mean_gx, View dx,
                                           const BatchNormOptions& options) const {
  const Queue queue("batch_norm_backward_data", x.device);
  const Input in(*this, queue, x, kChannelsLast), grad(*this, queue, dy, kChannelsLast);
  const Input result(*this, queue, options.relu ? y : TensorView(), kChannelsLast);
  const Input means(*this, queue, mean), rstds(*this, queue, rstd);
  const Input means_g(*this, queue, mean_g), means_gx(*this, queue, mean_gx);
  const Output out(*this, queue, dx, kChannelsLast);
  const std::int64_t columns = x.shape[1];
  core::dispatch_floating(x.dtype, "batch_norm_backward_data", [&](auto type) {
    using T = decltype(type);
    using A = Arithmetic<T>;
    const ChannelBuffers<A> channel(queue, columns);
    const ChannelGradient<A> gradient{channel.a, channel.b, channel.c, channel.d};
    const BatchNormTerms<T> terms{in.as<T>(),        result.as<T>(),    grad.as<T>(),
                                  means.as<float>(), rstds.as<float>(), columns};
    launch(queue, grid_for_channels(columns), given_gradients_kernel<A>, columns, AnyFloat(weight),
           terms.mean, terms.rstd, means_g.as<float>(), means_gx.as<float>(), gradient);
    channel_map<T>(queue, columns, BatchNormGradient<T>{terms, gradient}, grad, out,
                   packs_aligned(terms.x, terms.y, terms.dy));
  });
  out.finish();
}

}  // namespace cairn::kernels
