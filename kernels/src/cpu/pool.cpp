// 2-D pooling, channels-last: vectors run over the channels of a pixel. The backward passes gather:
// each pixel of dx adds up what the windows over it give, in a fixed order, so rows are independent
// and nothing is zeroed first.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/pool.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>

#include "cairn/core/parallel_for.h"
#include "cpu/channels_last.h"
#include "cpu/cpu_backend.h"
#include "cpu/pool_geometry.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

// Pixel numbers beside a V.
template <class V>
struct Indices {
  using Raw = std::int32_t;
  static HWY_INLINE Raw set(std::int64_t i) { return static_cast<std::int32_t>(i); }
  static HWY_INLINE Raw select(bool mask, Raw a, Raw b) { return mask ? a : b; }
  template <class Io>
  static HWY_INLINE void store(Io, Raw index, std::int32_t* p) {
    *p = index;
  }
  template <class Io>
  static HWY_INLINE bool equal(Io, const std::int32_t* p, Raw index) {
    return *p == index;
  }
  static HWY_INLINE bool either(bool a, bool b) { return a || b; }
  static HWY_INLINE bool both(bool a, bool b) { return a && b; }
};

template <>
struct Indices<Floats> {
  using Raw = hn::Vec<TagI>;
  static HWY_INLINE Raw set(std::int64_t i) {
    return hn::Set(TagI(), static_cast<std::int32_t>(i));
  }
  static HWY_INLINE Raw select(Mask mask, Raw a, Raw b) {
    return hn::IfThenElse(hn::RebindMask(TagI(), mask), a, b);
  }
  template <class Io>
  static HWY_INLINE void store(Io io, Raw index, std::int32_t* p) {  // as bits
    io.store(Floats(hn::BitCast(TagF(), index)), reinterpret_cast<float*>(p));
  }
  template <class Io>
  static HWY_INLINE Mask equal(Io io, const std::int32_t* p, Raw index) {
    const Floats bits = io.load(reinterpret_cast<const float*>(p));
    return hn::RebindMask(TagF(), hn::Eq(hn::BitCast(TagI(), bits.raw), index));
  }
  static HWY_INLINE Mask either(Mask a, Mask b) { return hn::Or(a, b); }
  static HWY_INLINE Mask both(Mask a, Mask b) { return hn::And(a, b); }
};

/// One pixel of y and of index.
template <class T>
void max_pixel(const T* x, T* y, std::int32_t* index, const PoolWindow& window, std::int64_t width,
               std::int64_t channels) {
  using V = Compute<T>;
  using I = Indices<V>;
  for_vectors<V>(channels, [&](auto io, std::int64_t c) HWY_ATTR {
    const std::int64_t first = window.h.begin * width + window.w.begin;
    V best = io.load(x + first * channels + c);
    auto winner = I::set(first);
    for (std::int64_t h = window.h.begin; h < window.h.end; ++h) {
      for (std::int64_t w = window.w.begin; w < window.w.end; ++w) {
        const V v = io.load(x + (h * width + w) * channels + c);
        const auto wins = I::either(v > best, I::both(v != v, best == best));
        best = select(wins, v, best);
        winner = I::select(wins, I::set(h * width + w), winner);
      }
    }
    io.store(best, y + c);
    I::store(io, winner, index + c);
  });
}

/// One pixel of dx: what the windows over it, in dy and index, give it.
template <class T>
void max_pixel_backward(const T* dy, const std::int32_t* index, T* dx, const PoolWindow& windows,
                        std::int64_t pixel, std::int64_t width, std::int64_t channels) {
  using V = Compute<T>;
  using I = Indices<V>;
  for_vectors<V>(channels, [&](auto io, std::int64_t c) HWY_ATTR {
    V sum(0.0);
    const auto self = I::set(pixel);
    for (std::int64_t h = windows.h.begin; h < windows.h.end; ++h) {
      for (std::int64_t w = windows.w.begin; w < windows.w.end; ++w) {
        const std::int64_t at = (h * width + w) * channels + c;
        sum = sum + select(I::equal(io, index + at, self), io.load(dy + at), V(0.0));
      }
    }
    io.store(sum, dx + c);
  });
}

/// y = factor * the sum of x over a window; forward and, with the windows over a pixel, backward.
template <class T>
void sum_pixel(const T* x, T* y, const PoolWindow& window, std::int64_t width,
               std::int64_t channels, double factor) {
  using V = Compute<T>;
  for_vectors<V>(channels, [&](auto io, std::int64_t c) HWY_ATTR {
    V sum(0.0);
    for (std::int64_t h = window.h.begin; h < window.h.end; ++h) {
      for (std::int64_t w = window.w.begin; w < window.w.end; ++w) {
        sum = sum + io.load(x + (h * width + w) * channels + c);
      }
    }
    io.store(V(factor) * sum, y + c);
  });
}

void MaxPoolRow(DType dtype, const PoolGeometry& g, const void* x, void* y, std::int32_t* index,
                std::int64_t row) {
  core::dispatch_floating(dtype, "max_pool2d", [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t h = row % g.target_height(), image = row / g.target_height();
    const T* from = static_cast<const T*>(x) + image * g.source_size();
    std::int64_t to = row * g.target_width() * g.channels();
    for (std::int64_t w = 0; w < g.target_width(); ++w, to += g.channels()) {
      max_pixel(from, static_cast<T*>(y) + to, index + to, g.window(h, w), g.source_width(),
                g.channels());
    }
  });
}

void MaxPoolBackwardRow(DType dtype, const PoolGeometry& g, const void* dy,
                        const std::int32_t* index, void* dx, std::int64_t row) {
  core::dispatch_floating(dtype, "max_pool2d_backward", [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t h = row % g.target_height(), image = row / g.target_height();
    const std::int64_t from = image * g.source_size(), first = h * g.target_width();
    T* to = static_cast<T*>(dx) + row * g.target_width() * g.channels();
    for (std::int64_t w = 0; w < g.target_width(); ++w, to += g.channels()) {
      max_pixel_backward(static_cast<const T*>(dy) + from, index + from, to, g.window(h, w),
                         first + w, g.source_width(), g.channels());
    }
  });
}

void AvgPoolRow(DType dtype, const PoolGeometry& g, const void* x, void* y, std::int64_t row) {
  core::dispatch_floating(dtype, "avg_pool2d", [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t h = row % g.target_height(), image = row / g.target_height();
    const T* from = static_cast<const T*>(x) + image * g.source_size();
    T* to = static_cast<T*>(y) + row * g.target_width() * g.channels();
    for (std::int64_t w = 0; w < g.target_width(); ++w, to += g.channels()) {
      sum_pixel(from, to, g.window(h, w), g.source_width(), g.channels(), g.share());
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(MaxPoolRow);
HWY_EXPORT(MaxPoolBackwardRow);
HWY_EXPORT(AvgPoolRow);

namespace {

// Calls body(row) for every row of the images of `target`, one after another.
template <class Body>
void for_rows(const TensorView& target, const PoolGeometry& g, const Body& body) {
  constexpr std::int64_t kGrain = 32768;  // elements
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / g.work_per_row());
  core::parallel_for(target.size(0) * target.size(2), grain,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t row = begin; row < end; ++row) body(row);
                     });
}

// y = mean over windows; forward and, from pooled to image, backward.
void average(const Backend& backend, const TensorView& x, const TensorView& y,
             const PoolGeometry& g) {
  const Temporary from = image_input(backend, x), to = image_output(y);
  for_rows(y, g, [&](std::int64_t row) {
    HWY_DYNAMIC_DISPATCH(AvgPoolRow)(x.dtype, g, from.view.data, to.view.data, row);
  });
  finish_output(backend, to, y);
}

}  // namespace

void CpuBackend::max_pool2d(View x, View y, View index, const Pool2dOptions& options) const {
  const auto g = PoolGeometry::forward(x.shape, y.shape, options);
  const Temporary from = image_input(*this, x), to = image_output(y), winners = image_output(index);
  for_rows(y, g, [&](std::int64_t row) {
    HWY_DYNAMIC_DISPATCH(MaxPoolRow)
    (x.dtype, g, from.view.data, to.view.data, winners.view.as<std::int32_t>(), row);
  });
  finish_output(*this, to, y);
  finish_output(*this, winners, index);
}

void CpuBackend::max_pool2d_backward(View dy, View index, View dx,
                                     const Pool2dOptions& options) const {
  const auto g = PoolGeometry::backward(dx.shape, dy.shape, options);
  const Temporary from = image_input(*this, dy), winners = image_input(*this, index);
  const Temporary to = image_output(dx);
  for_rows(dx, g, [&](std::int64_t row) {
    HWY_DYNAMIC_DISPATCH(MaxPoolBackwardRow)
    (dx.dtype, g, from.view.data, winners.view.as<std::int32_t>(), to.view.data, row);
  });
  finish_output(*this, to, dx);
}

void CpuBackend::avg_pool2d(View x, View y, const Pool2dOptions& options) const {
  average(*this, x, y, PoolGeometry::forward(x.shape, y.shape, options));
}

void CpuBackend::avg_pool2d_backward(View dy, View dx, const Pool2dOptions& options) const {
  average(*this, dy, dx, PoolGeometry::backward(dx.shape, dy.shape, options));
}

}  // namespace cairn::kernels
#endif
