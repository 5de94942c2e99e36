// Copies and fills. Equal dtypes move as plain words of their size; floating dtypes convert in
// compiled pairs; conversions that involve integers go through one kernel that looks at both dtypes
// at run time.
#pragma once

#include "cuda/device/any.cuh"
#include "cuda/device/layout.cuh"

namespace cairn::kernels::cuda {

template <class Word>
struct Constant {
  Word value;
  __device__ Word operator()() const { return value; }
};

template <class Word>
struct Same {
  __device__ Word operator()(Word x) const { return x; }
};

template <class X, class Y>
struct Convert {
  __device__ Y operator()(X x) const { return narrow<Y>(widen(x)); }
};

static __global__ void convert_any_kernel(std::int64_t n, Layout<2> layout, const void* x,
                                          DType from, void* y, DType to) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const auto at = layout.offsets(i);
    store_any(y, to, at.of[0], load_any(x, from, at.of[1]));
  }
}

}  // namespace cairn::kernels::cuda
