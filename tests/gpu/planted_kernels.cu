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

void shift_kernel(float* y, int count) {
  y[0] = static_cast<float>(1 << count);
}

void local_array_kernel(float* y, int i) {
  const float local[4] = {y[0], y[1], y[2], y[3]};
  y[0] = local[i];
}

void sum_of_integers_kernel(float* y, int a, int b) {
  y[0] = static_cast<float>(a + b);
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

void launch_shift(void* stream, float* y, int count) {
  simt::launch({dim3(1), dim3(1), 0, stream}, shift_kernel, y, count);
}
void launch_local_array(void* stream, float* y, int i) {
  simt::launch({dim3(1), dim3(1), 0, stream}, local_array_kernel, y, i);
}
void launch_sum_of_integers(void* stream, float* y, int a, int b) {
  simt::launch({dim3(1), dim3(1), 0, stream}, sum_of_integers_kernel, y, a, b);
}

}  // namespace cairn::test
