// Adam whose step, learning rate and loss scale lie on the device, and the flag that skips it. None
// of these kernels needs workspace, so a captured graph of them may be repeated at any time.
#pragma once

#include <cstring>

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
  const std::int32_t index = table.chunk_slot[blockIdx.x];
  const Slot& slot = table.slots[index];
  const AnyFloat x(slot.data[0], slot.dtype[0]);
  bool found = false;
  const auto see = [&](float value) { found = found || value - value != 0.0f; };
  visit_span(
      span_of(blockIdx.x, table.first_chunk[index], slot.count),
      [&](std::int64_t i) {
        const auto pack = load_pack_or<kLanes>(x, i, 0.0f);
        SIMT_UNROLL
        for (int k = 0; k < kLanes; ++k) see(pack[k]);
      },
      [&](std::int64_t i) { see(x.load<float>(i)); });
  if (found) *flag = 1.0f;
}

}  // namespace cairn::kernels::cuda
