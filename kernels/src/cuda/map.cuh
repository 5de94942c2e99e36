// y[i] = f(x0[i], x1[i], ...): every element-wise operation. Moves each operand once; 128-bit packs
// where all operands are linear and aligned, an index calculation per element where they are
// strided.
#pragma once

#include <array>
#include <utility>

#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/launch.cuh"

namespace cairn::kernels::cuda {

template <int N, class Out, class F, class... In>
__device__ __forceinline__ void map_pack(F f, Out* y, const Packed<In, N>&... x) {
  Packed<Out, N> result;
  SIMT_UNROLL
  for (int k = 0; k < N; ++k) result[k] = f(x[k]...);
  store_pack<N>(y, result);
}

/// x may be y: an element is read before it is written, by the same thread.
template <class F, class Out, class... In>
__global__ void map_kernel(std::int64_t n, bool packs, F f, Out* y, const In*... x) {
  constexpr int N = pack_width<Out, In...>;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x * N;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; i < n;
       i += step) {
    if (packs && i + N <= n) {
      map_pack<N>(f, y + i, load_pack<N>(x + i)...);
    } else {
      for (std::int64_t k = i; k < n && k < i + N; ++k) y[k] = f(x[k]...);
    }
  }
}

template <class F, class Out, class... In, std::size_t... K>
__device__ __forceinline__ void map_strided(std::int64_t n, const Layout<1 + sizeof...(In)>& layout,
                                            F f, Out* y, std::index_sequence<K...>,
                                            const In*... x) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const auto at = layout.offsets(i);
    y[at.of[0]] = f(x[at.of[K + 1]]...);
  }
}

template <class F, class Out, class... In>
__global__ void map_strided_kernel(std::int64_t n, Layout<1 + sizeof...(In)> layout, F f, Out* y,
                                   const In*... x) {
  map_strided(n, layout, f, y, std::index_sequence_for<In...>(), x...);
}

template <class Out, class... In, class F, std::size_t... K>
void launch_map(const Queue& queue, F f, const TensorView& y,
                const std::array<const TensorView*, sizeof...(In)>& x, std::index_sequence<K...>) {
  const core::Strides* const strides[] = {&y.strides, &x[K]->strides...};
  const auto layout = make_layout(y.shape, strides, Visit::any_order);
  const std::int64_t n = y.numel();
  if (n == 0) return;
  if (!layout.is_linear()) {
    void (*kernel)(std::int64_t, Layout<1 + sizeof...(In)>, F, Out*, const In*...) =
        map_strided_kernel<F, Out, In...>;
    launch(queue, grid_for(n), kernel, n, layout, f, y.as<Out>(), x[K]->template as<In>()...);
    return;
  }
  constexpr int N = pack_width<Out, In...>;
  const bool packs =
      pack_aligned<N>(y.as<Out>()) && (pack_aligned<N>(x[K]->template as<In>()) && ...);
  void (*kernel)(std::int64_t, bool, F, Out*, const In*...) = map_kernel<F, Out, In...>;
  launch(queue, grid_for(ceil_div(n, N)), kernel, n, packs, f, y.as<Out>(),
         x[K]->template as<In>()...);
}

/// map<Out, In...>(queue, f, y, {&x0, &x1}): all views have y's shape; f takes and returns the
/// storage types.
template <class Out, class... In, class F>
void map(const Queue& queue, F f, const TensorView& y,
         const std::array<const TensorView*, sizeof...(In)>& x) {
  launch_map<Out, In...>(queue, f, y, x, std::index_sequence_for<In...>());
}

}  // namespace cairn::kernels::cuda
