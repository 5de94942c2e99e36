#include "cuda/order.cuh"

#include "cuda/contiguous.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void CudaBackend::topk(View x, View index, bool largest) const {
  const Queue queue("topk", x.device);
  const Input in(*this, queue, x);
  const Output out(*this, queue, index);
  core::dispatch_all(x.dtype, [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(x.size(0), x.size(1), 8), topk_kernel<T>, x.size(0), x.size(1),
           index.size(1), largest, in.as<T>(), out.as<std::int64_t>());
  });
  out.finish();
}

void CudaBackend::cumsum(View x, View y, bool reverse) const {
  const Queue queue("cumsum", x.device);
  const Input in(*this, queue, x);
  const Output out(*this, queue, y);
  const std::int64_t columns = x.shape.back(), rows = x.numel() / columns;
  const Grid grid{std::min(rows, kMaxBlocks), columns <= 256 ? 32 : kScanThreads};
  core::dispatch_floating(x.dtype, "cumsum", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid, cumsum_kernel<T>, rows, columns, reverse, in.as<T>(), out.as<T>());
  });
  out.finish();
}

}  // namespace cairn::kernels
