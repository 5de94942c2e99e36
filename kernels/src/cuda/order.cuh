// topk and cumsum of rows, a block a row. topk: a pass over the row for each of the K, which looks
// for the first element that comes after the one before: for small K. cumsum: each thread adds up a
// stretch of the row, the stretches' sums are scanned, and each thread goes over its stretch again.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/device/convert.cuh"
#include "math/ranked.h"

namespace cairn::kernels::cuda {

template <class T>
struct FirstRanked {
  bool largest;
  __device__ Ranked<T> operator()(const Ranked<T>& a, const Ranked<T>& b) const {
    return comes_before(a, b, largest) ? a : b;
  }
};

template <class T>
__global__ void topk_kernel(std::int64_t rows, std::int64_t columns, std::int64_t k, bool largest,
                            const T* x, std::int64_t* index) {
  using Value = typename Ranked<T>::Value;
  const FirstRanked<T> first{largest};
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    Ranked<T> last{Value(0), -1};
    for (std::int64_t i = 0; i < k; ++i) {
      Ranked<T> best{Value(0), -1};
      for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
        const Ranked<T> here{static_cast<Value>(widen(x[row * columns + c])), c};
        if (i == 0 || comes_before(last, here, largest)) best = first(best, here);
      }
      last = block_reduce(best, first, Ranked<T>{Value(0), -1});
      if (threadIdx.x == 0) index[row * k + i] = last.place;
    }
  }
}

inline constexpr int kScanThreads = 256;

/// What the threads before this one have, added up. All threads of the block must call it.
template <class A>
__device__ A exclusive_scan(A value) {
  SIMT_SHARED(A, sums, kScanThreads);
  const unsigned t = threadIdx.x;
  sums[t] = value;
  __syncthreads();
  for (unsigned distance = 1; distance < blockDim.x; distance *= 2) {
    const A before = t >= distance ? sums[t - distance] : A(0);
    __syncthreads();
    sums[t] += before;
    __syncthreads();
  }
  const A result = t > 0 ? sums[t - 1] : A(0);
  __syncthreads();
  return result;
}

template <class T>
__global__ void cumsum_kernel(std::int64_t rows, std::int64_t columns, bool reverse, const T* x,
                              T* y) {
  using A = Arithmetic<T>;
  const std::int64_t stretch = (columns + blockDim.x - 1) / blockDim.x;
  const std::int64_t begin = threadIdx.x * stretch, beyond = begin + stretch;
  const std::int64_t end = beyond < columns ? beyond : columns;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t start = row * columns;
    const auto at = [&](std::int64_t i) { return start + (reverse ? columns - 1 - i : i); };
    A own = 0;
    for (std::int64_t i = begin; i < end; ++i) own += widen(x[at(i)]);
    A sum = exclusive_scan(own);
    for (std::int64_t i = begin; i < end; ++i) {
      sum += widen(x[at(i)]);
      y[at(i)] = narrow<T>(sum);
    }
  }
}

}  // namespace cairn::kernels::cuda
