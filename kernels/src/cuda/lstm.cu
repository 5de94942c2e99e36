#include "cuda/lstm.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "lstm_loop.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

LstmTime time_of(const LstmStep& step) {
  return {step.lengths.defined() ? step.lengths.as<std::int64_t>() : nullptr, step.t};
}

template <class T, class Cell, class... Pointers>
void launch_cell(const Queue& queue, View state, const Cell& cell, const Pointers*... pointers) {
  constexpr int N = pack_width<T>;
  const bool packs = state.size(1) % N == 0 && packs_aligned(pointers...);
  launch(queue, grid_for(ceil_div(state.numel(), N)), lstm_cell_kernel<T, Cell>, state.numel(),
         packs, cell);
}

}  // namespace

void CudaBackend::lstm_cell(View gates, View hidden, View carry, View h_before, View h, View c,
                            const LstmStep& step) const {
  const Queue queue("lstm_cell", gates.device);
  core::dispatch_floating(gates.dtype, "lstm_cell", [&](auto type) {
    using T = decltype(type);
    using A = Arithmetic<T>;
    const LstmCell<T> cell{h.size(1),     time_of(step),    gates.as<T>(), hidden.as<A>(),
                           carry.as<A>(), h_before.as<T>(), h.as<T>(),     c.as<T>()};
    launch_cell<T>(queue, h, cell, cell.gates, cell.hidden, cell.carry, cell.h_before, cell.h,
                   cell.c);
  });
}

void CudaBackend::lstm_cell_backward(View gates, View c_before, View c, View dy, View dh, View dc,
                                     const LstmStep& step) const {
  const Queue queue("lstm_cell_backward", gates.device);
  core::dispatch_floating(gates.dtype, "lstm_cell_backward", [&](auto type) {
    using T = decltype(type);
    using A = Arithmetic<T>;
    const LstmCellBackward<T> cell{c.size(1), time_of(step), gates.as<T>(), c_before.as<T>(),
                                   c.as<T>(), dy.as<T>(),    dh.as<A>(),    dc.as<A>()};
    launch_cell<T>(queue, c, cell, cell.gates, cell.c_before, cell.c, cell.dy, cell.dh, cell.dc);
  });
}

void CudaBackend::lstm(View gates, View weight, View h, View c, const LstmOptions& options) const {
  const auto times_weight = [&](View a, View y) { matmul(a, weight.transpose(0, 1), y, {}); };
  lstm_loop(*this, times_weight, gates, h, c, options);
}

void CudaBackend::lstm_backward(View gates, View weight, View c, View dy, View dh, View dc,
                                const LstmOptions& options) const {
  const auto add_times_weight = [&](View a, View y) { matmul(a, weight, y, {.accumulate = true}); };
  lstm_backward_loop(*this, add_times_weight, gates, c, dy, dh, dc, options);
}

}  // namespace cairn::kernels
