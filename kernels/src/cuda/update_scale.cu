#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "math/update_scale.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

__global__ void update_scale_kernel(ScaleState state, ScaleUpdateOptions options) {
  if (threadIdx.x == 0) state.step(options);
}

}  // namespace

void CudaBackend::update_scale(View scale, View growth_tracker, View hysteresis_tracker,
                               View found_inf, View overflows,
                               const ScaleUpdateOptions& options) const {
  const Queue queue("update_scale", scale.device);
  launch(queue, {1, 32}, update_scale_kernel,
         scale_state(scale, growth_tracker, hysteresis_tracker, found_inf, overflows), options);
}

}  // namespace cairn::kernels
