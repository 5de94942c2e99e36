// Products of small matrices by a warp: operands in shared memory, f32 sums in registers, spread
// over the lanes as the tensor cores' mma.m16n8k16 has them. Halves go through tensor cores, f32
// through plain multiply-adds with the same sums.
//
//   Sums<2, 64> scores = {};                                   // 32 x 64
//   add_product_transposed<128>(scores, queries, keys);        // += q k^T over 128 columns
//   add_product(out, scores, values);                          // out += scores v
#pragma once

#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {

/// Elements from a row of D columns in shared memory to the next: 16 bytes more than the row, so
/// that eight neighbouring rows lie in different banks.
template <class T, int D>
inline constexpr int tile_stride = D + 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x % 32);
}

/// A matrix of 16 M x N. Every lane has 2 M rows: its part of row(m, i) is of[m][j][i] and, beside
/// it in column(j, i), of[m][j][i + 1], for i = 0 and 2 and every j.
template <int M, int N>
struct Sums {
  float of[M][N / 8][4];

  static __device__ __forceinline__ int row(int m, int i) {
    return 16 * m + lane_index() / 4 + i / 2 * 8;
  }
  static __device__ __forceinline__ int column(int j, int i) {
    return 8 * j + lane_index() % 4 * 2 + i % 2;
  }

  /// f(value, m, j, i) of every element that is this lane's.
  template <class F>
  __device__ __forceinline__ void each(F f) {
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) {
      SIMT_UNROLL
      for (int j = 0; j < N / 8; ++j) {
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) f(of[m][j][i], m, j, i);
      }
    }
  }
};

/// N elements of shared memory, at a multiple of their size.
template <int N, class T>
__device__ __forceinline__ Packed<T, N> shared_pack(const T* shared) {
  Packed<T, N> pack;
  memcpy(static_cast<void*>(&pack), __builtin_assume_aligned(shared, sizeof(pack)), sizeof(pack));
  return pack;
}
template <int N, class T>
__device__ __forceinline__ void store_shared(T* shared, const Packed<T, N>& pack) {
  memcpy(static_cast<void*>(__builtin_assume_aligned(shared, sizeof(pack))), &pack, sizeof(pack));
}

/// Of the four lanes that share a row.
template <class Op>
__device__ __forceinline__ float row_reduce(float value, Op op) {
  value = op(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return op(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// The tensor cores' instructions.

/// Four 8 x 8 matrices of halves; lane l gives the address of row l % 8 of matrix l / 8. A lane
/// gets elements 2 (l % 4) and the next of row l / 4 of each matrix, or of its transpose.
template <bool Transposed, class T>
__device__ __forceinline__ void load_matrices(std::uint32_t (&words)[4], const T* row) {
#if defined(__CUDACC__)
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
  }
#else
  simt::load_matrices(row, Transposed, words, simt::Site::current());
#endif
}

/// sums += a b, 16 x 16 by 16 x 8.
template <class T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, Half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  const auto widen_bits = [](std::uint16_t bits) {
    T value;
    value.bits = bits;
    return widen(value);
  };
  simt::multiply_matrices(sums, a, {b0, b1}, widen_bits, simt::Site::current());
#endif
}

template <class T>
__device__ __forceinline__ Packed<T, 2> narrow_pair(float first, float second) {
#if defined(__CUDA_ARCH__)
  Packed<T, 2> pair;
  if constexpr (std::is_same_v<T, Half>) {
    const __half2 value = __floats2half2_rn(first, second);
    memcpy(static_cast<void*>(&pair), &value, 4);
    return pair;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 value = __floats2bfloat162_rn(first, second);
    memcpy(static_cast<void*>(&pair), &value, 4);
    return pair;
  }
#endif
  return {{narrow<T>(first), narrow<T>(second)}};
}

template <int D, int M, int N, class T>
__device__ __forceinline__ void add_half_product_transposed(Sums<M, N>& sums, const T* a,
                                                            const T* b) {
  constexpr int kStride = tile_stride<T, D>;
  const int lane = lane_index();
  a += lane % 16 * kStride + lane / 16 * 8;
  b += (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
  SIMT_UNROLL_BY(2)  // more would load ahead until registers are spilled
  for (int k = 0; k < D; k += 16) {
    std::uint32_t left[M][4];
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) load_matrices<false>(left[m], a + 16 * m * kStride + k);
    SIMT_UNROLL
    for (int n = 0; n < N; n += 16) {
      std::uint32_t right[4];
      load_matrices<false>(right, b + n * kStride + k);
      SIMT_UNROLL
      for (int m = 0; m < M; ++m) {
        multiply_add<T>(sums.of[m][n / 8], left[m], right[0], right[1]);
        multiply_add<T>(sums.of[m][n / 8 + 1], left[m], right[2], right[3]);
      }
    }
  }
}

template <int M, int K, int D, class T>
__device__ __forceinline__ void add_half_product(Sums<M, D>& sums, const Sums<M, K>& a,
                                                 const T* b) {
  constexpr int kStride = tile_stride<T, D>;
  const int lane = lane_index();
  b += lane % 16 * kStride + lane / 16 * 8;
  SIMT_UNROLL
  for (int k = 0; k < K; k += 16) {
    std::uint32_t left[M][4];
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) {
      SIMT_UNROLL
      for (int i = 0; i < 4; ++i) {  // its layout is that of the sums
        const float* const pair = a.of[m][k / 8 + i / 2] + i % 2 * 2;
        const auto narrowed = narrow_pair<T>(pair[0], pair[1]);
        memcpy(&left[m][i], &narrowed, 4);
      }
    }
    SIMT_UNROLL
    for (int d = 0; d < D; d += 16) {
      std::uint32_t right[4];
      load_matrices<true>(right, b + k * kStride + d);
      SIMT_UNROLL
      for (int m = 0; m < M; ++m) {
        multiply_add<T>(sums.of[m][d / 8], left[m], right[0], right[1]);
        multiply_add<T>(sums.of[m][d / 8 + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// Plain multiply-adds.

template <int D, int M, int N>
__device__ __forceinline__ void add_float_product_transposed(Sums<M, N>& sums, const float* a,
                                                             const float* b) {
  constexpr int kStride = tile_stride<float, D>;
  SIMT_UNROLL_BY(1)
  for (int k = 0; k < D; k += 4) {
    Packed<float, 4> left[M][2];
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) {
      left[m][0] = shared_pack<4>(a + Sums<M, N>::row(m, 0) * kStride + k);
      left[m][1] = shared_pack<4>(a + Sums<M, N>::row(m, 2) * kStride + k);
    }
    SIMT_UNROLL
    for (int j = 0; j < N / 8; ++j) {
      SIMT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const auto right = shared_pack<4>(b + Sums<M, N>::column(j, i) * kStride + k);
        SIMT_UNROLL
        for (int m = 0; m < M; ++m) {
          SIMT_UNROLL
          for (int c = 0; c < 4; ++c) {
            sums.of[m][j][i] += left[m][0][c] * right[c];
            sums.of[m][j][i + 2] += left[m][1][c] * right[c];
          }
        }
      }
    }
  }
}

template <int M, int K, int D>
__device__ __forceinline__ void add_float_product(Sums<M, D>& sums, const Sums<M, K>& a,
                                                  const float* b) {
  constexpr int kStride = tile_stride<float, D>;
  const int quad = lane_index() / 4 * 4;
  SIMT_UNROLL
  for (int k = 0; k < K; ++k) {
    float left[M][2];  // of the lane of the row that has column k
    SIMT_UNROLL
    for (int m = 0; m < M; ++m) {
      SIMT_UNROLL
      for (int i = 0; i < 2; ++i) {
        left[m][i] = __shfl_sync(0xffffffffu, a.of[m][k / 8][2 * i + k % 2], quad + k % 8 / 2);
      }
    }
    SIMT_UNROLL
    for (int j = 0; j < D / 8; ++j) {
      const auto right = shared_pack<2>(b + k * kStride + Sums<M, D>::column(j, 0));
      SIMT_UNROLL
      for (int m = 0; m < M; ++m) {
        SIMT_UNROLL
        for (int i = 0; i < 4; ++i) sums.of[m][j][i] += left[m][i / 2] * right[i % 2];
      }
    }
  }
}

/// sums += a b^T over D columns, with a 16 M x D and b N x D, both in rows of tile_stride<T, D>.
template <int D, int M, int N, class T>
__device__ __forceinline__ void add_product_transposed(Sums<M, N>& sums, const T* a, const T* b) {
  if constexpr (is_half_type<T>) {
    add_half_product_transposed<D>(sums, a, b);
  } else {
    add_float_product_transposed<D>(sums, a, b);
  }
}

/// sums += a b, with a rounded to T, and b K x D in rows of tile_stride<T, D>.
template <int M, int K, int D, class T>
__device__ __forceinline__ void add_product(Sums<M, D>& sums, const Sums<M, K>& a, const T* b) {
  if constexpr (is_half_type<T>) {
    add_half_product(sums, a, b);
  } else {
    add_float_product(sums, a, b);
  }
}

}  // namespace cairn::kernels::cuda
