#include "cuda/dropout.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

void CudaBackend::dropout(View x, double p, const core::RandomDraw& draw, View y) const {
  const Queue queue("dropout", y.device);
  const std::int64_t n = y.numel();
  if (n == 0) return;
  const core::Strides* const strides[] = {&y.strides, &x.strides};
  const auto layout = make_layout(y.shape, strides, Visit::row_major);
  const double scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
  core::dispatch_floating(y.dtype, "dropout", [&](auto type) {
    using T = decltype(type);
    const bool packs = layout.is_linear() && packs_aligned(x.as<T>(), y.as<T>());
    const DropoutGroup<T> groups{math::dropout_threshold(p), static_cast<Arithmetic<T>>(scale),
                                 draw};
    launch(queue, grid_for(ceil_div(n, packs ? dropout_width<T> : 4)), dropout_kernel<T>, n, packs,
           layout, groups, x.as<T>(), y.as<T>());
  });
}

}  // namespace cairn::kernels
