// Reductions over the threads of a warp and of a block, in a fixed order; every thread gets the
// result.
#pragma once

#include <cstring>

#include "cuda/device/simt.h"
#include "math/functions.h"

namespace cairn::kernels::cuda {

/// __shfl_xor_sync for any type made of 32-bit words.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lanes) {
  constexpr int kWords = sizeof(T) / 4;
  static_assert(sizeof(T) % 4 == 0);
  unsigned words[kWords];
  memcpy(words, &value, sizeof(T));
  SIMT_UNROLL
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(0xffffffffu, words[i], lanes);
  memcpy(&value, words, sizeof(T));
  return value;
}

/// Two sums that go together.
template <class A>
struct Two {
  A first, second;
  __device__ Two operator+(const Two& other) const {
    return {first + other.first, second + other.second};
  }
};

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {  // NaN wins
  template <class T>
  __device__ T operator()(T a, T b) const {
    return math::max(a, b);
  }
};

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
  SIMT_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) value = op(value, shuffle_xor(value, lanes));
  return value;
}

/// For blocks of whole warps. All threads must call it; it may be called again at once.
template <class T, class Op>
__device__ T block_reduce(T value, Op op, T identity) {
  value = warp_reduce(value, op);
  if (blockDim.x == 32) return value;
  SIMT_SHARED(T, partial, 32);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < blockDim.x / 32 ? partial[lane] : identity, op);
  __syncthreads();
  return value;
}

template <class T>
__device__ T block_sum(T value) {
  return block_reduce(value, Sum{}, T{});
}

}  // namespace cairn::kernels::cuda
