// Kernels with one fault each, and one without any: what scripts/cuda_report must find. Compiled by
// planted_test.py, never run.
#include <cuda_runtime.h>

#include <cstdint>

__device__ inline std::int64_t first() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t step() {
  return std::int64_t{gridDim.x} * blockDim.x;
}
__device__ inline float4 twice(float4 x) {
  return {2 * x.x, 2 * x.y, 2 * x.z, 2 * x.w};
}

/// Whole packs, then the elements that are left.
__global__ void good_kernel(std::int64_t n, const float* x, float* y) {
  const std::int64_t packs = n / 4;
  for (std::int64_t i = first(); i < packs; i += step()) {
    __stwb(reinterpret_cast<float4*>(y) + i, twice(reinterpret_cast<const float4*>(x)[i]));
  }
  for (std::int64_t i = packs * 4 + first(); i < n; i += step()) y[i] = 2 * x[i];
}

/// Loads in packs, stores its elements.
__global__ void narrow_stores_kernel(std::int64_t n, const float4* x, float* y) {
  for (std::int64_t i = first(); i < n; i += step()) {
    const float4 twofold = twice(x[i]);
    y[i] = twofold.x, y[i + n] = twofold.y, y[i + 2 * n] = twofold.z, y[i + 3 * n] = twofold.w;
  }
}

/// A narrow load beside each wide one.
__global__ void narrow_loads_kernel(std::int64_t n, const float4* x, const float* scale,
                                    float4* y) {
  for (std::int64_t i = first(); i < n; i += step()) {
    float4 pack = x[i];
    pack.x *= scale[i];
    __stwb(y + i, pack);
  }
}

/// No wide access at all.
__global__ void single_elements_kernel(std::int64_t n, const float* x, float* y) {
  for (std::int64_t i = first(); i < n; i += step()) y[i] = 2 * x[i];
}

/// An array with an index that is known at run time only.
__global__ void local_frame_kernel(std::int64_t n, const int* places, const float4* x, float4* y) {
  float table[32];
  for (int k = 0; k < 32; ++k) table[k] = x[k].x;
  for (std::int64_t i = first(); i < n; i += step()) {
    float4 pack = x[i];
    pack.x += table[(places[0] + i) & 31];
    __stwb(y + i, pack);
  }
}

/// 96 live values in 32 registers.
__global__ void __launch_bounds__(1024, 2)
    spill_kernel(std::int64_t n, const float4* x, float4* y) {
  float values[96];
#pragma unroll
  for (int k = 0; k < 96; ++k) values[k] = x[k].x;
  for (std::int64_t i = first(); i < n; i += step()) {
    float4 pack = x[i];
#pragma unroll
    for (int k = 0; k < 96; ++k) pack.x = pack.x * values[k] + values[95 - k];
    __stwb(y + i, pack);
  }
}

__global__ void unlisted_kernel(float* y) {
  *y = 1;
}
