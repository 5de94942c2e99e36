// Masters put together from bf16 weights and remainders, taken apart, and made to follow weights.
#pragma once

#include <cstdint>

#include "cuda/device/convert.cuh"
#include "math/master.h"

namespace cairn::kernels::cuda {

static __global__ void join_master_kernel(std::int64_t n, const BFloat16* weight,
                                          const std::int16_t* remainder, float* out) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    out[i] = math::join_master(weight[i], remainder[i]);
  }
}

static __global__ void split_master_kernel(std::int64_t n, const float* in, BFloat16* weight,
                                           std::int16_t* remainder) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    math::split_master(in[i], weight[i], remainder[i]);
  }
}

template <class T>
static __global__ void reconcile_master_kernel(std::int64_t n, const T* weight, float* master) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    master[i] = math::reconciled(weight[i], narrow<T>(master[i]), master[i]);
  }
}

}  // namespace cairn::kernels::cuda
