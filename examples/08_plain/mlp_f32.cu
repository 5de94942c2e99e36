#include "mlp_kernels.cuh"

namespace plain {
namespace {

__global__ void adamw_kernel(float* weights, const float* gradients, float* m, float* v,
                             std::size_t size, float correction1, float correction2, float lr,
                             float decay, int ranks) {
  const unsigned i = this_thread();
  if (i >= size) return;
  const float g = gradients[i] / static_cast<float>(ranks);
  m[i] = 0.9f * m[i] + 0.1f * g;
  v[i] = 0.999f * v[i] + 0.001f * g * g;
  const float update = m[i] / correction1 / (sqrtf(v[i] / correction2) + 1e-8f);
  weights[i] -= lr * (update + decay * weights[i]);
}

}  // namespace

void adamw(float* weights, const float* gradients, float* m, float* v, std::size_t size, int step,
           float lr, float decay, int ranks, CUstream_st* stream) {
  const float correction1 = 1.0f - powf(0.9f, static_cast<float>(step));
  const float correction2 = 1.0f - powf(0.999f, static_cast<float>(step));
  adamw_kernel<<<blocks_for(size), 128, 0, stream>>>(weights, gradients, m, v, size, correction1,
                                                     correction2, lr, decay, ranks);
}

template void forward_backward<float>(const MlpSizes&, const MlpArrays<float>&, float,
                                      CUstream_st*);

}  // namespace plain
