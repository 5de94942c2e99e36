// Resampling of images, channels-last: vectors run over the channels of a pixel. Each pixel of the
// result adds up what it reads, with weights from tables, forward and backward alike.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/resample.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>

#include "cairn/core/parallel_for.h"
#include "cpu/channels_last.h"
#include "cpu/cpu_backend.h"
#include "cpu/resample_taps.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// One pixel: the sum of weighted pixels of x, `width` a row.
template <class T>
void resample_pixel(const T* x, T* y, const Taps::Pixel& rows, const Taps::Pixel& columns,
                    std::int64_t width, std::int64_t channels) {
  using V = Compute<T>;
  for_vectors<V>(channels, [&](auto io, std::int64_t c) HWY_ATTR {
    V sum(0.0);
    for (std::int64_t h = 0; h < rows.count; ++h) {
      for (std::int64_t w = 0; w < columns.count; ++w) {
        const std::int64_t at = (rows.begin + h) * width + columns.begin + w;
        sum = fma(V(rows.weights[h] * columns.weights[w]), io.load(x + at * channels + c), sum);
      }
    }
    io.store(sum, y + c);
  });
}

void ResampleRow(DType dtype, const TensorView& x, const TensorView& y, const Taps& rows,
                 const Taps& columns, std::int64_t row) {
  core::dispatch_floating(dtype, "resample2d", [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t channels = x.size(1), image = row / y.size(2);
    const T* from = x.as<T>() + image * x.size(2) * x.size(3) * channels;
    T* to = y.as<T>() + row * y.size(3) * channels;
    for (std::int64_t w = 0; w < y.size(3); ++w, to += channels) {
      resample_pixel(from, to, rows.of(row % y.size(2)), columns.of(w), x.size(3), channels);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(ResampleRow);

namespace {

void resample(const Backend& backend, const TensorView& x, const TensorView& y, const Taps& rows,
              const Taps& columns) {
  const Temporary from = image_input(backend, x), to = image_output(y);
  constexpr std::int64_t kGrain = 32768;  // elements
  const std::int64_t work =
      y.size(1) * (y.size(3) + columns.total() * (1 + rows.total() / y.size(2)));
  core::parallel_for(y.size(0) * y.size(2), std::max<std::int64_t>(1, kGrain / work),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t row = begin; row < end; ++row) {
                         HWY_DYNAMIC_DISPATCH(ResampleRow)
                         (x.dtype, from.view, to.view, rows, columns, row);
                       }
                     });
  finish_output(backend, to, y);
}

}  // namespace

void CpuBackend::resample2d(View x, View y, const ResampleOptions& options) const {
  resample(*this, x, y, Taps::forward({options, x.size(2), y.size(2)}, y.size(2)),
           Taps::forward({options, x.size(3), y.size(3)}, y.size(3)));
}

void CpuBackend::resample2d_backward(View dy, View dx, const ResampleOptions& options) const {
  resample(*this, dy, dx, Taps::backward({options, dx.size(2), dy.size(2)}, dx.size(2)),
           Taps::backward({options, dx.size(3), dy.size(3)}, dx.size(3)));
}

}  // namespace cairn::kernels
#endif
