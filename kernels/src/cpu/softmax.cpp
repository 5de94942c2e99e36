// softmax and log-softmax over the last dimension. A row is read three times, but from the
// first-level cache after the first.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/softmax.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>
#include <limits>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/rows.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// The largest scale * x; NaN elements are left to the sum.
template <class V, class T>
double row_max(const T* x, std::int64_t n, double scale) {
  const V lowest(-std::numeric_limits<double>::infinity()), factor(scale);
  V best = lowest;
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    const V v = io.keep(factor * io.load(x + i), lowest);
    best = larger(v, best);
  });
  return max_of(best);
}

/// One row; columns from n on give `masked`.
template <class T>
void softmax_row(const T* x, T* y, std::int64_t n, std::int64_t width, bool log_form,
                 double scale) {
  using V = Compute<T>;
  const double top = n > 0 ? row_max<V>(x, n, scale) : 0.0;
  const V factor(scale), shift(top);
  constexpr bool kKeepExp = sizeof(T) >= 4;  // halves would be rounded twice
  V total(0.0);
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    const V e = exp(factor * io.load(x + i) - shift);
    total = total + io.keep(e, V(0.0));
    if (kKeepExp && !log_form) io.store(e, y + i);
  });
  const double sum = sum_of(total);
  const V inverse(1.0 / sum), log_sum(top + std::log(sum));
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    if (log_form) {
      io.store(factor * io.load(x + i) - log_sum, y + i);
    } else if (kKeepExp) {
      io.store(inverse * io.load(y + i), y + i);
    } else {
      io.store(inverse * exp(factor * io.load(x + i) - shift), y + i);
    }
  });
  const V masked(log_form ? -std::numeric_limits<double>::infinity() : 0.0);
  for_vectors<V>(width - n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(masked, y + n + i); });
}

template <class T>
void softmax_backward_row(const T* y, const T* dy, T* dx, std::int64_t n, std::int64_t width,
                          bool log_form, double scale) {
  using V = Compute<T>;
  V total(0.0);
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    const V g = io.load(dy + i);
    total = total + (log_form ? g : g * io.load(y + i));
  });
  const V sum(sum_of(total)), factor(scale);
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    const V g = io.load(dy + i), v = io.load(y + i);
    io.store(factor * (log_form ? g - exp(v) * sum : v * (g - sum)), dx + i);
  });
  for_vectors<V>(width - n,
                 [&](auto io, std::int64_t i) HWY_ATTR { io.store(V(0.0), dx + n + i); });
}

void SoftmaxRow(DType dtype, const void* x, void* y, std::int64_t n, std::int64_t width,
                bool log_form, double scale) {
  core::dispatch_floating(dtype, "softmax", [&](auto zero) {
    using T = decltype(zero);
    softmax_row(static_cast<const T*>(x), static_cast<T*>(y), n, width, log_form, scale);
  });
}

void SoftmaxBackwardRow(DType dtype, const void* y, const void* dy, void* dx, std::int64_t n,
                        std::int64_t width, bool log_form, double scale) {
  core::dispatch_floating(dtype, "softmax_backward", [&](auto zero) {
    using T = decltype(zero);
    softmax_backward_row(static_cast<const T*>(y), static_cast<const T*>(dy), static_cast<T*>(dx),
                         n, width, log_form, scale);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(SoftmaxRow);
HWY_EXPORT(SoftmaxBackwardRow);

namespace {

/// How many columns each row of a view sees.
class Visible {
 public:
  Visible(const TensorView& view, const SoftmaxOptions& options)
      : width_(view.shape.back()),
        queries_(options.causal ? view.shape[view.dims() - 2] : 0),
        lengths_(options.lengths) {
    if (lengths_.defined() && view.numel() > 0) rows_ = view.numel() / width_ / view.size(0);
  }
  std::int64_t of(std::int64_t row) const {
    const std::int64_t n = length(row);
    if (queries_ == 0) return n;
    return std::clamp<std::int64_t>(row % queries_ + 1 + width_ - queries_, 0, n);
  }

 private:
  std::int64_t length(std::int64_t row) const {
    if (!lengths_.defined()) return width_;
    return std::clamp<std::int64_t>(lengths_.as<std::int64_t>()[row / rows_], 0, width_);
  }

  std::int64_t width_, queries_;
  std::int64_t rows_ = 1;  // of a length
  TensorView lengths_;
};

}  // namespace

void CpuBackend::softmax(View x, View y, const SoftmaxOptions& options) const {
  const cpu::Rows from(x, cpu::Access::read), to(y, cpu::Access::write);
  const Visible visible(x, options);
  core::parallel_for(from.count(), cpu::row_grain(from.width()),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t i = begin; i < end; ++i) {
                         HWY_DYNAMIC_DISPATCH(SoftmaxRow)
                         (x.dtype, from.row(i), to.row(i), visible.of(i), from.width(), options.log,
                          options.scale);
                       }
                     });
  to.finish();
}

void CpuBackend::softmax_backward(View y, View dy, View dx, const SoftmaxOptions& options) const {
  const cpu::Rows output(y, cpu::Access::read), from(dy, cpu::Access::read),
      to(dx, cpu::Access::write);
  const Visible visible(y, options);
  core::parallel_for(output.count(), cpu::row_grain(output.width()),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t i = begin; i < end; ++i) {
                         HWY_DYNAMIC_DISPATCH(SoftmaxBackwardRow)
                         (y.dtype, output.row(i), from.row(i), to.row(i), visible.of(i),
                          output.width(), options.log, options.scale);
                       }
                     });
  to.finish();
}

}  // namespace cairn::kernels
#endif
