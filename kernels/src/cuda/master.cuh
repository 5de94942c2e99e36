// Masters put together from bf16 weights and remainders, taken apart, and made to follow weights.
#pragma once

#include <cstdint>

#include "cuda/device/packed.cuh"
#include "math/master.h"

namespace cairn::kernels::cuda {

struct JoinMaster {
  __device__ float operator()(BFloat16 weight, std::int16_t remainder) const {
    return math::join_master(weight, remainder);
  }
};

template <class T>
struct ReconcileMaster {
  __device__ float operator()(T weight, float master) const {
    return math::reconciled(weight, narrow<T>(master), master);
  }
};

struct ReconcileRemainder {
  __device__ std::int16_t operator()(BFloat16 weight, BFloat16 former,
                                     std::int16_t remainder) const {
    return math::reconciled_remainder(weight, former, remainder);
  }
};

static __global__ void split_master_kernel(std::int64_t n, bool packs, const float* in,
                                           BFloat16* weight, std::int16_t* remainder) {
  constexpr int N = pack_width<BFloat16>;
  visit_grid<N>(
      n, packs, [&](std::int64_t i) { math::split_master(in[i], weight[i], remainder[i]); },
      [&](std::int64_t i) {
        const auto pack = load_pack<N>(in + i);
        Packed<BFloat16, N> high;
        Packed<std::int16_t, N> low;
        SIMT_UNROLL
        for (int k = 0; k < N; ++k) math::split_master(pack[k], high[k], low[k]);
        store_pack<N>(weight + i, high);
        store_pack<N>(remainder + i, low);
      });
}

}  // namespace cairn::kernels::cuda
