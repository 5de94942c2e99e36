// y[i] = f(x0[i], x1[i], ...): every element-wise operation. Moves each operand once; 128-bit packs
// where all operands are linear, or rows of whole packs, and aligned; elsewhere an index
// calculation per element.
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
  visit_grid<N>(
      n, packs, [&](std::int64_t i) { y[i] = f(x[i]...); },
      [&](std::int64_t i) { map_pack<N>(f, y + i, load_pack<N>(x + i)...); });
}

template <class F, class Out, class... In, std::size_t... K>
__device__ __forceinline__ void map_strided(std::int64_t n, bool packs,
                                            const Layout<1 + sizeof...(In)>& layout, F f, Out* y,
                                            std::index_sequence<K...>, const In*... x) {
  constexpr int N = pack_width<Out, In...>;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::int64_t i = first; packs && i < n; i += step) {
    const auto at = layout.offsets(i);
    map_pack<N>(f, y + at.of[0], load_pack<N>(x + at.of[K + 1])...);
  }
  for (std::int64_t i = first; !packs && i < n; i += step) {
    const auto at = layout.offsets(i);
    y[at.of[0]] = f(x[at.of[K + 1]]...);
  }
}

/// n elements, or n packs where the layout is one of packs (take_packs).
template <class F, class Out, class... In>
__global__ void map_strided_kernel(std::int64_t n, bool packs, Layout<1 + sizeof...(In)> layout,
                                   F f, Out* y, const In*... x) {
  map_strided(n, packs, layout, f, y, std::index_sequence_for<In...>(), x...);
}

template <class Out, class... In, class F, std::size_t... K>
void launch_map(const Queue& queue, F f, const TensorView& y,
                const std::array<const TensorView*, sizeof...(In)>& x, std::index_sequence<K...>) {
  constexpr int N = pack_width<Out, In...>;
  const core::Strides* const strides[] = {&y.strides, &x[K]->strides...};
  auto layout = make_layout(y.shape, strides, Visit::any_order);
  std::int64_t n = y.numel();
  if (n == 0) return;
  const bool aligned = packs_aligned(y.as<Out>(), x[K]->template as<In>()...);
  if (layout.is_linear()) {
    void (*kernel)(std::int64_t, bool, F, Out*, const In*...) = map_kernel<F, Out, In...>;
    launch(queue, grid_for(ceil_div(n, N)), kernel, n, aligned, f, y.as<Out>(),
           x[K]->template as<In>()...);
    return;
  }
  const bool packs = aligned && take_packs<N>(layout);
  if (packs) n /= N;
  void (*kernel)(std::int64_t, bool, Layout<1 + sizeof...(In)>, F, Out*, const In*...) =
      map_strided_kernel<F, Out, In...>;
  launch(queue, grid_for(n), kernel, n, packs, layout, f, y.as<Out>(), x[K]->template as<In>()...);
}

/// map<Out, In...>(queue, f, y, {&x0, &x1}): all views have y's shape; f takes and returns the
/// storage types.
template <class Out, class... In, class F>
void map(const Queue& queue, F f, const TensorView& y,
         const std::array<const TensorView*, sizeof...(In)>& x) {
  launch_map<Out, In...>(queue, f, y, x, std::index_sequence_for<In...>());
}

}  // namespace cairn::kernels::cuda
