// Dropout without a mask: the same counters give the same words again.
#pragma once

#include "cairn/core/generator.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "math/dropout.h"

namespace cairn::kernels::cuda {

/// The words of a counter decide on four consecutive elements (row-major).
template <class T>
struct DropoutGroup {
  std::uint32_t threshold;
  Arithmetic<T> scale;
  core::RandomDraw draw;

  struct Words {
    std::uint32_t of[4];
  };
  __device__ Words words(std::int64_t group) const {
    const auto drawn = core::philox(draw.seed, draw.offset, static_cast<std::uint64_t>(group));
    return {{drawn[0], drawn[1], drawn[2], drawn[3]}};
  }
  __device__ T dropped(T value, std::uint32_t word) const {
    const bool keep = math::dropout_keeps(word, threshold);
    return narrow<T>(keep ? widen(value) * scale : Arithmetic<T>(0));
  }
};

template <class T>
inline constexpr int dropout_width = pack_width<T> < 4 ? 4 : pack_width<T>;

/// packs: x and y are linear and aligned.
template <class T>
__global__ void dropout_kernel(std::int64_t n, bool packs, Layout<2> layout, DropoutGroup<T> groups,
                               const T* x, T* y) {
  groups.draw = groups.draw.resolved();
  constexpr int N = dropout_width<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t whole = packs ? n / N : 0;
  for (std::int64_t i = first; i < whole; i += step) {
    auto pack = load_pack<N>(x + i * N);
    SIMT_UNROLL
    for (int g = 0; g < N / 4; ++g) {
      const auto words = groups.words(i * (N / 4) + g);
      SIMT_UNROLL
      for (int k = 0; k < 4; ++k) pack[4 * g + k] = groups.dropped(pack[4 * g + k], words.of[k]);
    }
    store_pack<N>(y + i * N, pack);
  }
  for (std::int64_t group = whole * (N / 4) + first; group * 4 < n; group += step) {
    const auto words = groups.words(group);
    for (int k = 0; k < 4 && group * 4 + k < n; ++k) {
      const auto at = layout.offsets(group * 4 + k);
      y[at.of[0]] = groups.dropped(x[at.of[1]], words.of[k]);
    }
  }
}

}  // namespace cairn::kernels::cuda
