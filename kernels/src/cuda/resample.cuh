// Resampling of images, a thread an element of the result, neighbouring threads along the
// closest-stored dimension. The backward gathers: an element of dx looks at those of dy that read
// it, in order, so nothing is added atomically.
#pragma once

#include "cuda/device/convert.cuh"
#include "cuda/pool.cuh"
#include "math/resample.h"

namespace cairn::kernels::cuda {

template <class T>
__global__ void resample_kernel(ResampleAxis rows, ResampleAxis columns, Image x, Image y,
                                const T* in, T* out) {
  using A = Arithmetic<T>;
  const std::int64_t n = y.numel(), step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Place p = place(y, i);
    const auto over = rows.sources(p.h), beside = columns.sources(p.w);
    A sum = 0;
    for (std::int64_t h = over.begin; h < over.end; ++h) {
      const A weight = rows.weight<A>(p.h, h);
      for (std::int64_t w = beside.begin; w < beside.end; ++w) {
        sum += weight * columns.weight<A>(p.w, w) * widen(in[x.at(p.n, p.c, h, w)]);
      }
    }
    out[y.at(p.n, p.c, p.h, p.w)] = narrow<T>(sum);
  }
}

template <class T>
__global__ void resample_backward_kernel(ResampleAxis rows, ResampleAxis columns, Image dy,
                                         Image dx, const T* in, T* out) {
  using A = Arithmetic<T>;
  const std::int64_t n = dx.numel(), step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Place p = place(dx, i);
    const auto over = rows.targets(p.h), beside = columns.targets(p.w);
    A sum = 0;
    for (std::int64_t h = over.begin; h < over.end; ++h) {
      const A weight = rows.weight<A>(h, p.h);
      for (std::int64_t w = beside.begin; w < beside.end; ++w) {
        sum += weight * columns.weight<A>(w, p.w) * widen(in[dy.at(p.n, p.c, h, w)]);
      }
    }
    out[dx.at(p.n, p.c, p.h, p.w)] = narrow<T>(sum);
  }
}

}  // namespace cairn::kernels::cuda
