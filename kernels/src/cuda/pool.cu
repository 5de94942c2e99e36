#include "cuda/pool.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void CudaBackend::max_pool2d(View x, View y, View index, const Pool2dOptions& options) const {
  if (y.numel() == 0) return;
  const Queue queue("max_pool2d", y.device);
  core::dispatch_floating(x.dtype, "max_pool2d", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for(y.numel()), max_pool_kernel<T>, Windows(options), image(x), image(y),
           image(index), x.as<T>(), y.as<T>(), index.as<std::int32_t>());
  });
}

void CudaBackend::max_pool2d_backward(View dy, View index, View dx,
                                      const Pool2dOptions& options) const {
  if (dx.numel() == 0) return;
  const Queue queue("max_pool2d_backward", dx.device);
  core::dispatch_floating(dx.dtype, "max_pool2d_backward", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for(dx.numel()), max_pool_backward_kernel<T>, Windows(options), image(dy),
           image(index), image(dx), dy.as<T>(), index.as<std::int32_t>(), dx.as<T>());
  });
}

void CudaBackend::avg_pool2d(View x, View y, const Pool2dOptions& options) const {
  if (y.numel() == 0) return;
  const Queue queue("avg_pool2d", y.device);
  core::dispatch_floating(x.dtype, "avg_pool2d", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for(y.numel()), avg_pool_kernel<T>, Windows(options), image(x), image(y),
           x.as<T>(), y.as<T>());
  });
}

void CudaBackend::avg_pool2d_backward(View dy, View dx, const Pool2dOptions& options) const {
  if (dx.numel() == 0) return;
  const Queue queue("avg_pool2d_backward", dx.device);
  core::dispatch_floating(dx.dtype, "avg_pool2d_backward", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for(dx.numel()), avg_pool_backward_kernel<T>, Windows(options), image(dy),
           image(dx), dy.as<T>(), dx.as<T>());
  });
}

}  // namespace cairn::kernels
