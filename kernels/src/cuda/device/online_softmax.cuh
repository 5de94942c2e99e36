// Softmax of a warp's rows in one pass over their columns, in powers of two.
#pragma once

#include <limits>

#include "cuda/device/block.cuh"
#include "cuda/device/tile.cuh"

namespace cairn::kernels::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLn2 = 0.6931471805599453f;

/// 2^x to about 22 bits; 0 instead of subnormal numbers.
__device__ __forceinline__ float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return ::exp2f(x);
#endif
}

/// Softmax of rows whose columns come tile by tile.
template <int M>
struct OnlineSoftmax {
  float max[M][2], sum[M][2];  // sum: of this lane's columns

  __device__ OnlineSoftmax() {
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < 2; ++r) {
        max[m][r] = -kInfinity;
        sum[m][r] = 0.0f;
      }
    }
  }

  /// Turns scores (log2) into weights relative to the rows' maxima, and brings what was summed
  /// before to those.
  template <int N, int D>
  __device__ __forceinline__ void add(Sums<M, N>& scores, Sums<M, D>& out) {
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) {
      SIMT_UNROLL
      for (int r = 0; r < 2; ++r) add_row(m, r, scores.of[m], out.of[m]);
    }
  }
  template <int NJ, int DJ>
  __device__ __forceinline__ void add_row(int m, int r, float (&scores)[NJ][4],
                                          float (&out)[DJ][4]) {
    float top = max[m][r];
    SIMT_UNROLL
    for (int j = 0; j < NJ; ++j) {
      top = fmaxf(top, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
    }
    top = row_reduce(top, [](float a, float b) { return fmaxf(a, b); });
    const float base = top == -kInfinity ? 0.0f : top;
    const float factor = power_of_two(max[m][r] - base);
    max[m][r] = top;
    sum[m][r] *= factor;
    SIMT_UNROLL
    for (int j = 0; j < NJ; ++j) {
      SIMT_UNROLL
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        scores[j][i] = power_of_two(scores[j][i] - base);
        sum[m][r] += scores[j][i];
      }
    }
    SIMT_UNROLL
    for (int j = 0; j < DJ; ++j) {
      out[j][2 * r] *= factor;
      out[j][2 * r + 1] *= factor;
    }
  }
  /// Once, after the last tile.
  __device__ __forceinline__ void finish() {
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) {
      SIMT_UNROLL
      for (int r = 0; r < 2; ++r) sum[m][r] = row_reduce(sum[m][r], Sum{});
    }
  }
};

}  // namespace cairn::kernels::cuda
