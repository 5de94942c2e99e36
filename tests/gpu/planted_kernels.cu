#include "gpu/planted_kernels.h"

#include "cuda/device/packed.cuh"
#include "simt/emulator.h"

namespace cairn::test {
namespace {

simt::Launch shape(void* stream, int count) {
  return {dim3(static_cast<unsigned>((count + 31) / 32)), dim3(32), 0, stream};
}

void fill_kernel(float* data, int count, float value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) data[i] = value;
}

void add_kernel(const float* x, float* y, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) y[i] += x[i];
}

void copy_pack_kernel(const float* x, float* y) {
  kernels::cuda::store_pack<4>(y, kernels::cuda::load_pack<4>(x));
}

void shared_overrun_kernel(float* y) {
  SIMT_SHARED(float, shared, 32);
  shared[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x + 1];
}

void divergent_barrier_kernel() {
  if (threadIdx.x < 16) __syncthreads();
}

}  // namespace

void launch_fill(void* stream, float* data, int count, float value) {
  simt::launch(shape(stream, count), fill_kernel, data, count, value);
}
void launch_add(void* stream, const float* x, float* y, int count) {
  simt::launch(shape(stream, count), add_kernel, x, y, count);
}
void launch_copy_16_bytes(void* stream, const float* x, float* y) {
  simt::launch({dim3(1), dim3(1), 0, stream}, copy_pack_kernel, x, y);
}
void launch_shared_overrun(void* stream, float* y) {
  simt::launch(shape(stream, 32), shared_overrun_kernel, y);
}
void launch_divergent_barrier(void* stream) {
  simt::launch(shape(stream, 32), divergent_barrier_kernel);
}

}  // namespace cairn::test
