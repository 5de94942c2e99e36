// A rule that kernels find on the device, and the flag that skips it.
#pragma once

#include <cstring>

#include "cuda/list_chunk.cuh"
#include "cuda/optimizer_update.cuh"
#include "math/device_step.h"
#include "math/found_nonfinite.h"

namespace cairn::kernels::cuda {

/// One thread of each block works out the constants of the step from what lies on the device.
template <class Options>
struct RuleOnDevice {
  Options options;
  StepState state;
  double gradient_factor, l2;  // of every entry, and of the rule

  /// f(formula, scalars) in all threads of a block, unless the step is skipped.
  template <class F>
  __device__ __forceinline__ void with(std::int32_t, F f) const {
    using Formula = decltype(math::formula_of<float>(options));
    struct Constants {
      EntryScalars scalars;
      alignas(8) unsigned char formula[sizeof(Formula)];
    };
    if (state.skipped()) return;
    SIMT_SHARED(Constants, shared, 1);
    if (threadIdx.x == 0) {
      const Options now = followed(options, state);
      const auto formula = math::formula_of<float>(now);
      memcpy(shared[0].formula, &formula, sizeof(formula));
      shared[0].scalars = {static_cast<float>(now.gradient_scale * gradient_factor),
                           static_cast<float>(l2), 1.0f};
    }
    __syncthreads();
    const Formula formula = *reinterpret_cast<const Formula*>(shared[0].formula);
    const EntryScalars scalars = shared[0].scalars;
    f(formula, scalars);
  }
  __device__ bool skipped() const { return state.skipped(); }
  __device__ double lr() const { return *state.lr; }
};

template <class Options>
__global__ void update_device_kernel(Table table, RuleOnDevice<Options> rule) {
  rule.with(table.chunk_slot[blockIdx.x], [&](const auto& formula, const EntryScalars& scalars) {
    update_block(table, scalars, formula);
  });
}

static __global__ void advance_step_kernel(std::int32_t* step, const float* found_inf) {
  if (threadIdx.x == 0) advance(step, found_inf);
}

static __global__ void clear_flag_kernel(float* flag) {
  if (threadIdx.x == 0) *flag = 0.0f;
}

/// Every thread that finds an inf or a NaN writes the same 1.
static __global__ void find_nonfinite_kernel(Table table, float* flag, float* each) {
  bool found = false;
  see_chunk(BlockChunk(table), [&](float x) { found = found || x - x != 0.0f; });
  if (!found) return;
  *flag = 1.0f;
  if (each != nullptr) each[table.chunk_slot[blockIdx.x]] = 1.0f;
}

static __global__ void judge_kernel(FoundState found, const TensorCheck* checks,
                                    std::int64_t count) {
  if (threadIdx.x == 0) found.judge(checks, count);
}

}  // namespace cairn::kernels::cuda
