// What stands between LAMB's passes where the host adds up norms: those go there, and step lengths
// come back.
#pragma once

#include "cuda/lamb.cuh"

namespace cairn::kernels::cuda {

/// A warp a tensor, which gets two checks.
static __global__ void lamb_checks_kernel(Table table, const LambNorms* parts,
                                          TensorCheck* checks) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x);
  const LambNorms norms = joined_chunks(table, slot, parts, AddNorms{}, LambNorms{0.0, 0.0});
  if (threadIdx.x != 0) return;
  checks[2 * slot] = {norms.weight, 0, 0};
  checks[2 * slot + 1] = {norms.update, 0, 0};
}

static __global__ void lamb_steps_of_host_kernel(ListScalars list, std::int32_t slots,
                                                 float* steps) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < slots;
       i += static_cast<std::int32_t>(blockDim.x)) {
    steps[i] = list.of(i).of_norm;
  }
}

}  // namespace cairn::kernels::cuda
