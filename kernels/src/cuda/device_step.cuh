// Adam whose step, learning rate and loss scale lie on the device, and the flag that skips it. None
// of these kernels needs workspace, so a captured graph of them may be repeated at any time.
#pragma once

#include <cstring>

#include "cuda/list_chunk.cuh"
#include "cuda/optimizer_update.cuh"
#include "math/device_step.h"

namespace cairn::kernels::cuda {

static __global__ void advance_step_kernel(StepState state) {
  if (threadIdx.x == 0 && !state.skipped()) ++*state.step;
}

/// One thread of each block works out the constants of the step.
static __global__ void adam_device_kernel(Table table, EntryScalars scalars, AdamNumbers numbers,
                                          StepState state) {
  using Adam = math::Adam<float>;
  struct Constants {
    float values[sizeof(Adam) / sizeof(float)];
  };
  if (state.skipped()) return;
  SIMT_SHARED(Constants, shared, 1);
  if (threadIdx.x == 0) {
    numbers.follow(state);
    const Adam adam(numbers);
    memcpy(&shared[0], &adam, sizeof(adam));
  }
  __syncthreads();
  scalars.scale /= state.scale();
  Adam adam;
  memcpy(&adam, &shared[0], sizeof(adam));
  update_block(table, scalars, adam);
}

static __global__ void clear_flag_kernel(float* flag) {
  if (threadIdx.x == 0) *flag = 0.0f;
}

/// Every thread that finds an inf or a NaN writes the same 1.
static __global__ void find_nonfinite_kernel(Table table, float* flag) {
  bool found = false;
  see_chunk(BlockChunk(table), [&](float x) { found = found || x - x != 0.0f; });
  if (found) *flag = 1.0f;
}

}  // namespace cairn::kernels::cuda
