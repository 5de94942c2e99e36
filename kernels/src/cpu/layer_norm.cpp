// layer_norm and rms_norm: one row at a time, read from memory once and from the first-level cache
// after that.
//
// dweight and dbias are summed over chunks of rows whose size depends on the shape alone, then over
// the chunks in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/layer_norm.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/row_norm.h"
#include "cpu/rows.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// The sum over the row of f(io, i), a vector.
template <class V, class F>
HWY_INLINE double row_total(std::int64_t n, const F& f) {
  V total(0.0);
  for_vectors<V>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { total = total + io.keep(f(io, i), V(0.0)); });
  return sum_of(total);
}

template <class T>
NormStatistics norm_row(const NormForward& a) {
  using V = Compute<T>;
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.y);
  const auto* weight = static_cast<const Wide<T>*>(a.weight);
  const auto* bias = static_cast<const Wide<T>*>(a.bias);
  const double n = static_cast<double>(a.width);
  const double mean = a.centred ? row_total<V>(a.width, [&](auto io, std::int64_t i)
                                                            HWY_ATTR { return io.load(x + i); }) /
                                      n
                                : 0.0;
  const V centre(mean);
  const double variance = row_total<V>(a.width,
                                       [&](auto io, std::int64_t i) HWY_ATTR {
                                         const V d = io.load(x + i) - centre;
                                         return d * d;
                                       }) /
                          n;
  const double rstd = 1.0 / std::sqrt(variance + a.eps);
  const V scale(rstd);
  for_vectors<V>(a.width, [&](auto io, std::int64_t i) HWY_ATTR {
    const V normal = (io.load(x + i) - centre) * scale;
    io.store(fma(normal, io.load(weight + i), io.load(bias + i)), y + i);
  });
  return {mean, rstd};
}

/// dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy weight; without mean(g) where the row
/// was not centred.
template <class T>
void norm_backward_row(const NormBackward& a) {
  using V = Compute<T>;
  using A = Wide<T>;
  const T* x = static_cast<const T*>(a.x);
  const T* dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.dx);
  const A* weight = static_cast<const A*>(a.weight);
  A* dweight = static_cast<A*>(a.dweight);
  A* dbias = static_cast<A*>(a.dbias);
  const V centre(a.statistics.mean), scale(a.statistics.rstd);
  V total_g(0.0), total_gx(0.0);
  for_vectors<V>(a.width, [&](auto io, std::int64_t i) HWY_ATTR {
    const V d = io.load(dy + i), normal = (io.load(x + i) - centre) * scale;
    const V g = d * io.load(weight + i);  // 0 beyond the end
    total_g = total_g + g;
    total_gx = fma(g, normal, total_gx);
    io.store(fma(d, normal, io.load(dweight + i)), dweight + i);
    io.store(d + io.load(dbias + i), dbias + i);
  });
  if (dx == nullptr) return;
  const double n = static_cast<double>(a.width);
  const V mean_g(a.centred ? sum_of(total_g) / n : 0.0), mean_gx(sum_of(total_gx) / n);
  for_vectors<V>(a.width, [&](auto io, std::int64_t i) HWY_ATTR {
    const V normal = (io.load(x + i) - centre) * scale;
    const V g = io.load(dy + i) * io.load(weight + i);
    io.store(scale * (g - mean_g - normal * mean_gx), dx + i);
  });
}

NormStatistics NormRow(const NormForward& a) {
  NormStatistics statistics{};
  core::dispatch_floating(a.dtype, "layer_norm",
                          [&](auto zero) { statistics = norm_row<decltype(zero)>(a); });
  return statistics;
}

void NormBackwardRow(const NormBackward& a) {
  core::dispatch_floating(a.dtype, "layer_norm_backward",
                          [&](auto zero) { norm_backward_row<decltype(zero)>(a); });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(NormRow);
HWY_EXPORT(NormBackwardRow);

namespace {

template <class F>
void dispatch_wide(DType dtype, const F& f) {
  if (dtype == DType::f64) {
    f(double{});
  } else {
    f(float{});
  }
}

/// mean is undefined for rms_norm.
void norm_forward(const TensorView& x, const TensorView& weight, const TensorView& bias, double eps,
                  const TensorView& y, const TensorView& mean, const TensorView& rstd) {
  const cpu::Rows from(x, cpu::Access::read), to(y, cpu::Access::write);
  const bool centred = mean.defined();
  const cpu::Column means(centred ? mean : rstd), rstds(rstd);
  dispatch_wide(x.dtype, [&](auto zero) {
    using A = decltype(zero);
    const std::vector<A> w = cpu::values_or<A>(weight, from.width(), A{1});
    const std::vector<A> b = cpu::values_or<A>(bias, from.width(), A{0});
    core::parallel_for(
        from.count(), cpu::row_grain(from.width()), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const NormStatistics s = HWY_DYNAMIC_DISPATCH(NormRow)(
                {x.dtype, centred, eps, from.row(i), to.row(i), w.data(), b.data(), from.width()});
            if (centred) means.set(i, s.mean);
            rstds.set(i, s.rstd);
          }
        });
  });
  to.finish();
}

/// gradient (+)= the partial sums, in order; partials is [chunks][width].
template <class A>
void sum_partials(const std::vector<A>& partials, std::int64_t chunks, std::int64_t width,
                  const TensorView& gradient, bool accumulate) {
  if (!gradient.defined()) return;
  const cpu::Column out(gradient);
  core::parallel_for(width, 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      double total = accumulate ? out.get(i) : 0.0;
      for (std::int64_t c = 0; c < chunks; ++c)
        total += partials[static_cast<std::size_t>(c * width + i)];
      out.set(i, total);
    }
  });
}

void norm_backward(const TensorView& x, const TensorView& weight, const TensorView& mean,
                   const TensorView& rstd, const TensorView& dy, const TensorView& dx,
                   const TensorView& dweight, const TensorView& dbias, bool accumulate) {
  const cpu::Rows inputs(x, cpu::Access::read), gradients(dy, cpu::Access::read);
  const cpu::Rows outputs(dx.defined() ? dx : x,
                          dx.defined() ? cpu::Access::write : cpu::Access::read);
  const bool centred = mean.defined();
  const cpu::Column means(centred ? mean : rstd), rstds(rstd);
  const std::int64_t rows = inputs.count(), width = x.shape[1];
  const std::int64_t height = std::max<std::int64_t>(16, rows / 64);  // rows per partial sum
  const std::int64_t chunks = (rows + height - 1) / height;
  dispatch_wide(x.dtype, [&](auto zero) {
    using A = decltype(zero);
    const std::vector<A> w = cpu::values_or<A>(weight, width, A{1});
    std::vector<A> dw(static_cast<std::size_t>(chunks * width)),
        db(static_cast<std::size_t>(chunks * width));
    core::parallel_for(rows, height, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t at = begin / height * width;
      for (std::int64_t i = begin; i < end; ++i) {
        const NormStatistics s{centred ? means.get(i) : 0.0, rstds.get(i)};
        HWY_DYNAMIC_DISPATCH(NormBackwardRow)
        ({x.dtype, centred, s, inputs.row(i), gradients.row(i),
          dx.defined() ? outputs.row(i) : nullptr, w.data(), dw.data() + at, db.data() + at,
          width});
      }
    });
    sum_partials(dw, chunks, width, dweight, accumulate);
    sum_partials(db, chunks, width, dbias, accumulate);
  });
  outputs.finish();
}

}  // namespace

void CpuBackend::layer_norm(View x, View weight, View bias, double eps, View y, View mean,
                            View rstd) const {
  norm_forward(x, weight, bias, eps, y, mean, rstd);
}

void CpuBackend::layer_norm_backward(View x, View weight, View mean, View rstd, View dy, View dx,
                                     View dweight, View dbias, bool accumulate) const {
  norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate);
}

void CpuBackend::rms_norm(View x, View weight, double eps, View y, View rstd) const {
  norm_forward(x, weight, TensorView{}, eps, y, TensorView{}, rstd);
}

void CpuBackend::rms_norm_backward(View x, View weight, View rstd, View dy, View dx, View dweight,
                                   bool accumulate) const {
  norm_backward(x, weight, TensorView{}, rstd, dy, dx, dweight, TensorView{}, accumulate);
}

}  // namespace cairn::kernels
#endif
