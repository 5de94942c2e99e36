// Pooling, a thread an element of the output, neighbouring threads along the closest-stored
// dimension. The backward gathers: an element of dx looks at the windows that cover it, in order,
// so nothing is added atomically.
#pragma once

#include "cairn/kernels/pool.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"

namespace cairn::kernels::cuda {

struct Image {  // [N, C, H, W] with any strides
  std::int64_t n, c, h, w;
  std::int64_t stride_n, stride_c, stride_h, stride_w;

  Image() = default;
  explicit Image(const core::Shape& s, const core::Strides& t)
      : n(s[0]),
        c(s[1]),
        h(s[2]),
        w(s[3]),
        stride_n(t[0]),
        stride_c(t[1]),
        stride_h(t[2]),
        stride_w(t[3]) {}
  CAIRN_HOST_DEVICE std::int64_t numel() const { return n * c * h * w; }
  __device__ std::int64_t at(std::int64_t in, std::int64_t ic, std::int64_t ih,
                             std::int64_t iw) const {
    return in * stride_n + ic * stride_c + ih * stride_h + iw * stride_w;
  }
};

inline Image image(const core::TensorView& view) {
  return Image(view.shape, view.strides);
}

struct Place {
  std::int64_t n, c, h, w;
};

/// The i-th place of an image, visited along its closest-stored dimension.
__device__ inline Place place(const Image& image, std::int64_t i) {
  Place p{};
  const auto next = [&i](std::int64_t size) {
    const std::int64_t outer = divide(i, size), inner = i - outer * size;
    i = outer;
    return inner;
  };
  const bool channels_last = image.stride_c <= image.stride_w;
  if (channels_last) p.c = next(image.c);
  p.w = next(image.w);
  p.h = next(image.h);
  if (!channels_last) p.c = next(image.c);
  p.n = i;
  return p;
}

struct Windows {
  std::int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
  bool adaptive;

  explicit Windows(const Pool2dOptions& o)
      : kernel_h(o.kernel[0]),
        kernel_w(o.kernel[1]),
        stride_h(o.stride[0]),
        stride_w(o.stride[1]),
        padding_h(o.padding[0]),
        padding_w(o.padding[1]),
        adaptive(o.output.has_value()) {}
};

struct Range {
  std::int64_t begin, end;
};
/// Elements that window `index` covers.
__device__ inline Range covered(std::int64_t index, std::int64_t kernel, std::int64_t stride,
                                std::int64_t padding, std::int64_t size) {
  const std::int64_t begin = index * stride - padding;
  return {begin < 0 ? 0 : begin, smaller(begin + kernel, size)};
}
/// Windows that cover element `index`.
__device__ inline Range covering(std::int64_t index, std::int64_t kernel, std::int64_t stride,
                                 std::int64_t padding, std::int64_t windows) {
  const std::int64_t last = index + padding, first = last - kernel + 1;
  return {first <= 0 ? 0 : divide(first + stride - 1, stride),
          smaller(divide(last, stride) + 1, windows)};
}

/// Both of an adaptive pool: elements of `from` that belong to place `index` of `to`.
__device__ inline Range adaptive(std::int64_t index, std::int64_t from, std::int64_t to) {
  return {divide(index * from, to), divide((index + 1) * from + to - 1, to)};
}

template <class T>
__global__ void max_pool_kernel(Windows w, Image x, Image y, Image index, const T* in, T* out,
                                std::int32_t* winner) {
  using A = Arithmetic<T>;
  const std::int64_t n = y.n * y.c * y.h * y.w, step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Place p = place(y, i);
    const Range rows = w.adaptive ? adaptive(p.h, x.h, y.h)
                                  : covered(p.h, w.kernel_h, w.stride_h, w.padding_h, x.h);
    const Range columns = w.adaptive ? adaptive(p.w, x.w, y.w)
                                     : covered(p.w, w.kernel_w, w.stride_w, w.padding_w, x.w);
    A best = 0;
    std::int64_t at = -1;
    for (std::int64_t h = rows.begin; h < rows.end; ++h) {
      for (std::int64_t v = columns.begin; v < columns.end; ++v) {
        const A value = widen(in[x.at(p.n, p.c, h, v)]);
        if (at < 0 || value > best || (value != value && best == best)) {
          best = value, at = h * x.w + v;
        }
      }
    }
    out[y.at(p.n, p.c, p.h, p.w)] = narrow<T>(best);
    winner[index.at(p.n, p.c, p.h, p.w)] = static_cast<std::int32_t>(at);
  }
}

template <class T>
__global__ void max_pool_backward_kernel(Windows w, Image dy, Image index, Image dx, const T* in,
                                         const std::int32_t* winner, T* out) {
  using A = Arithmetic<T>;
  const std::int64_t n = dx.n * dx.c * dx.h * dx.w, step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Place p = place(dx, i);
    const Range rows = w.adaptive ? adaptive(p.h, dy.h, dx.h)
                                  : covering(p.h, w.kernel_h, w.stride_h, w.padding_h, dy.h);
    const Range columns = w.adaptive ? adaptive(p.w, dy.w, dx.w)
                                     : covering(p.w, w.kernel_w, w.stride_w, w.padding_w, dy.w);
    A sum = 0;
    for (std::int64_t h = rows.begin; h < rows.end; ++h) {
      for (std::int64_t v = columns.begin; v < columns.end; ++v) {
        if (winner[index.at(p.n, p.c, h, v)] == p.h * dx.w + p.w) {
          sum += widen(in[dy.at(p.n, p.c, h, v)]);
        }
      }
    }
    out[dx.at(p.n, p.c, p.h, p.w)] = narrow<T>(sum);
  }
}

template <class T>
__global__ void avg_pool_kernel(Windows w, Image x, Image y, const T* in, T* out) {
  using A = Arithmetic<T>;
  const std::int64_t n = y.n * y.c * y.h * y.w, step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Place p = place(y, i);
    const Range rows = covered(p.h, w.kernel_h, w.stride_h, w.padding_h, x.h);
    const Range columns = covered(p.w, w.kernel_w, w.stride_w, w.padding_w, x.w);
    A sum = 0;
    for (std::int64_t h = rows.begin; h < rows.end; ++h) {
      for (std::int64_t v = columns.begin; v < columns.end; ++v) {
        sum += widen(in[x.at(p.n, p.c, h, v)]);
      }
    }
    out[y.at(p.n, p.c, p.h, p.w)] = narrow<T>(sum / static_cast<A>(w.kernel_h * w.kernel_w));
  }
}

template <class T>
__global__ void avg_pool_backward_kernel(Windows w, Image dy, Image dx, const T* in, T* out) {
  using A = Arithmetic<T>;
  const std::int64_t n = dx.n * dx.c * dx.h * dx.w, step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Place p = place(dx, i);
    const Range rows = covering(p.h, w.kernel_h, w.stride_h, w.padding_h, dy.h);
    const Range columns = covering(p.w, w.kernel_w, w.stride_w, w.padding_w, dy.w);
    A sum = 0;
    for (std::int64_t h = rows.begin; h < rows.end; ++h) {
      for (std::int64_t v = columns.begin; v < columns.end; ++v) {
        sum += widen(in[dy.at(p.n, p.c, h, v)]);
      }
    }
    out[dx.at(p.n, p.c, p.h, p.w)] = narrow<T>(sum / static_cast<A>(w.kernel_h * w.kernel_w));
  }
}

}  // namespace cairn::kernels::cuda
