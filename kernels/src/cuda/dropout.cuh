// Dropout without a mask: the same counters give the same words again.
#pragma once

#include "cairn/core/generator.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "math/dropout.h"

namespace cairn::kernels::cuda {

/// Each thread draws four words for four consecutive elements (row-major). Linear views move packs
/// where aligned.
template <class T>
__global__ void dropout_kernel(std::int64_t n, bool linear, bool packs, Layout<2> layout,
                               std::uint32_t threshold, Arithmetic<T> scale, std::uint64_t seed,
                               std::uint64_t offset, const T* x, T* y) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t group = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; group * 4 < n;
       group += step) {
    const auto words = core::philox(seed, offset, static_cast<std::uint64_t>(group));
    const std::uint32_t bits[4] = {words[0], words[1], words[2], words[3]};
    const auto dropped = [&](T value, std::int64_t k) {
      const bool keep = math::dropout_keeps(bits[k], threshold);
      return narrow<T>(keep ? widen(value) * scale : Arithmetic<T>(0));
    };
    const std::int64_t first = group * 4;
    if (packs && first + 4 <= n) {
      auto pack = load_pack<4>(x + first);
      SIMT_UNROLL
      for (int k = 0; k < 4; ++k) pack[k] = dropped(pack[k], k);
      store_pack<4>(y + first, pack);
      continue;
    }
    for (std::int64_t i = first; i < n && i < first + 4; ++i) {
      const auto at = linear ? Layout<2>::Offsets{{i, i}} : layout.offsets(i);
      y[at.of[0]] = dropped(x[at.of[1]], i - first);
    }
  }
}

}  // namespace cairn::kernels::cuda
