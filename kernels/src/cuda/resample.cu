#include "cuda/resample.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void CudaBackend::resample2d(View x, View y, const ResampleOptions& options) const {
  const Queue queue("resample2d", y.device);
  const ResampleAxis rows(options, x.size(2), y.size(2)), columns(options, x.size(3), y.size(3));
  core::dispatch_floating(x.dtype, "resample2d", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for(y.numel()), resample_kernel<T>, rows, columns, image(x), image(y),
           x.as<T>(), y.as<T>());
  });
}

void CudaBackend::resample2d_backward(View dy, View dx, const ResampleOptions& options) const {
  const Queue queue("resample2d_backward", dx.device);
  const ResampleAxis rows(options, dx.size(2), dy.size(2)),
      columns(options, dx.size(3), dy.size(3));
  core::dispatch_floating(dx.dtype, "resample2d_backward", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for(dx.numel()), resample_backward_kernel<T>, rows, columns, image(dy),
           image(dx), dy.as<T>(), dx.as<T>());
  });
}

}  // namespace cairn::kernels
