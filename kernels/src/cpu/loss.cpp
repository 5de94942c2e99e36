// cross_entropy in one pass over the logits forward (running maximum and sum) and one backward; mse
// and bce_with_logits.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/loss.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>
#include <limits>

#include "cairn/core/parallel_for.h"
#include "cpu/cpu_backend.h"
#include "cpu/cross_entropy.h"
#include "cpu/element.h"
#include "cpu/loop.h"
#include "cpu/rows.h"
#include "cpu/simd.h"
#include "math/losses.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

constexpr std::int64_t kPart =
    1024;  // elements whose maximum is taken before their exponentials are summed

template <class T>
RowSums row_sums(const T* x, std::int64_t n) {
  using V = Compute<T>;
  const double inf = std::numeric_limits<double>::infinity();
  double top = -inf, exp_sum = 0.0, sum = 0.0;
  for (std::int64_t at = 0; at < n; at += kPart) {
    const T* part = x + at;
    const std::int64_t count = std::min(kPart, n - at);
    V best(-inf), plain(0.0);
    for_vectors<V>(count, [&](auto io, std::int64_t i) HWY_ATTR {
      const V v = io.load(part + i);
      plain = plain + v;
      best = larger(io.keep(v, V(-inf)), best);
    });
    sum += sum_of(plain);
    const double part_top = max_of(best);
    if (part_top > top) {
      exp_sum *= std::exp(top - part_top);
      top = part_top;
    }
    const V shift(top == -inf ? 0.0 : top);
    V total(0.0);
    for_vectors<V>(count, [&](auto io, std::int64_t i) HWY_ATTR {
      total = total + io.keep(exp(io.load(part + i) - shift), V(0.0));
    });
    exp_sum += sum_of(total);
  }
  return {(top == -inf ? 0.0 : top) + std::log(exp_sum), sum};
}

RowSums LogitSums(DType dtype, const void* x, std::int64_t n) {
  RowSums sums{};
  core::dispatch_floating(dtype, "cross_entropy", [&](auto zero) {
    sums = row_sums(static_cast<const decltype(zero)*>(x), n);
  });
  return sums;
}

template <class T>
void gradient_row(const LogitGradient& a) {
  using V = Compute<T>;
  using S = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const T* x = static_cast<const T*>(a.x);
  T* dx = static_cast<T*>(a.dx);
  const auto hot = static_cast<std::size_t>(std::max<std::int64_t>(a.target, 0));
  const double p = std::exp(static_cast<double>(static_cast<S>(x[hot])) - a.log_sum_exp);
  const V shift(a.log_sum_exp), scale(a.scale), base(a.base);
  const auto body = [&](auto io, std::int64_t i) HWY_ATTR {
    io.leave(scale * (exp(io.load(x + i) - shift) - base), dx + i);
  };
  if (a.streamed) {
    for_streamed_vectors<V>(a.classes, dx, body);
  } else {
    for_vectors<V>(a.classes, body);
  }
  if (a.target >= 0) dx[hot] = T(static_cast<S>(a.scale * (p - a.base - a.extra)));
}

void LogitGradientRow(const LogitGradient& a) {
  core::dispatch_floating(a.dtype, "cross_entropy_backward",
                          [&](auto zero) { gradient_row<decltype(zero)>(a); });
}

/// Calls f(T{}, L{}) with the types of the inputs and of the loss.
template <class F>
void dispatch_loss(DType dtype, DType loss, const F& f) {
  core::dispatch_floating(dtype, "loss", [&](auto zero) {
    if (loss == DType::f64) {
      f(zero, double{});
    } else {
      f(zero, float{});
    }
  });
}

template <class F, class T, class L>
void loss_run(const F& f, const T* x, const T* target, L* loss, std::int64_t n) {
  for_vectors<Compute2<T, L>>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(f.forward(io.load(x + i), io.load(target + i)), loss + i);
  });
}

template <class F, class T, class L>
void loss_backward_run(const F& f, const T* x, const T* target, const L* dloss, T* dx,
                       std::int64_t n) {
  for_vectors<Compute2<T, L>>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(f.backward(io.load(x + i), io.load(target + i), io.load(dloss + i)), dx + i);
  });
}

template <class F>
void forward(DType dtype, DType loss, void* const* data, std::int64_t n) {
  dispatch_loss(dtype, loss, [&](auto t, auto l) {
    using T = decltype(t);
    loss_run(F{}, static_cast<const T*>(data[0]), static_cast<const T*>(data[1]),
             static_cast<decltype(l)*>(data[2]), n);
  });
}

template <class F>
void backward(DType dtype, DType loss, void* const* data, std::int64_t n) {
  dispatch_loss(dtype, loss, [&](auto t, auto l) {
    using T = decltype(t);
    loss_backward_run(F{}, static_cast<const T*>(data[0]), static_cast<const T*>(data[1]),
                      static_cast<const decltype(l)*>(data[2]), static_cast<T*>(data[3]), n);
  });
}

void MseRun(DType dtype, DType loss, void* const* data, std::int64_t n) {
  forward<math::SquaredError>(dtype, loss, data, n);
}
void MseBackwardRun(DType dtype, DType loss, void* const* data, std::int64_t n) {
  backward<math::SquaredError>(dtype, loss, data, n);
}
void BceRun(DType dtype, DType loss, void* const* data, std::int64_t n) {
  forward<math::BinaryCrossEntropy>(dtype, loss, data, n);
}
void BceBackwardRun(DType dtype, DType loss, void* const* data, std::int64_t n) {
  backward<math::BinaryCrossEntropy>(dtype, loss, data, n);
}
void ProbabilityBceRun(DType dtype, DType loss, void* const* data, std::int64_t n) {
  forward<math::ProbabilityCrossEntropy>(dtype, loss, data, n);
}
void ProbabilityBceBackwardRun(DType dtype, DType loss, void* const* data, std::int64_t n) {
  backward<math::ProbabilityCrossEntropy>(dtype, loss, data, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(LogitSums);
HWY_EXPORT(LogitGradientRow);
HWY_EXPORT(MseRun);
HWY_EXPORT(MseBackwardRun);
HWY_EXPORT(BceRun);
HWY_EXPORT(BceBackwardRun);
HWY_EXPORT(ProbabilityBceRun);
HWY_EXPORT(ProbabilityBceBackwardRun);

namespace {

/// Throws for a target that is neither a class nor ignored.
void check_targets(const char* op, const TensorView& target, std::int64_t classes,
                   std::int64_t ignore_index) {
  for (std::int64_t i = 0; i < target.numel(); ++i) {
    const std::int64_t t = target.as<std::int64_t>()[i * target.strides[0]];
    CAIRN_CHECK((t >= 0 && t < classes) || t == ignore_index, op, "expected targets in 0..",
                classes - 1, " or ", ignore_index, " (ignored), got ", t, " in row ", i);
  }
}

}  // namespace

void CpuBackend::cross_entropy(View logits, View target, View loss, View lse,
                               const CrossEntropyOptions& options) const {
  const cpu::Rows rows(logits, cpu::Access::read);
  const cpu::Column losses(loss), sums_out(lse);
  const std::int64_t classes = rows.width();
  check_targets("cross_entropy", target, classes, options.ignore_index);
  const double smoothing = options.label_smoothing;
  core::parallel_for(
      target.numel(), cpu::row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t t = target.as<std::int64_t>()[i * target.strides[0]];
          const RowSums sums = HWY_DYNAMIC_DISPATCH(LogitSums)(logits.dtype, rows.row(i), classes);
          sums_out.set(i, sums.log_sum_exp);
          if (t == options.ignore_index) {
            losses.set(i, 0.0);
            continue;
          }
          const double x = cpu::element_at(logits, i * logits.strides[0] + t * logits.strides[1]);
          double value = sums.log_sum_exp - (1.0 - smoothing) * x;
          if (smoothing != 0.0) value -= smoothing * sums.sum / static_cast<double>(classes);
          losses.set(i, value);
        }
      });
}

void CpuBackend::cross_entropy_backward(View logits, View target, View lse, View dloss,
                                        View dlogits, const CrossEntropyOptions& options,
                                        ClassSlice slice) const {
  const cpu::Rows rows(logits, cpu::Access::read), out(dlogits, cpu::Access::write);
  const cpu::Column sums(lse), gradients(dloss);
  const std::int64_t classes = rows.width();
  check_targets("cross_entropy_backward", target, slice.all, options.ignore_index);
  const double base =
      options.label_smoothing / static_cast<double>(std::max<std::int64_t>(1, slice.all));
  const double extra = 1.0 - options.label_smoothing;
  const bool streamed = static_cast<std::int64_t>(dlogits.nbytes()) >= cpu::kStreamedBytes &&
                        dlogits.data != logits.data;
  const std::size_t row_bytes = static_cast<std::size_t>(classes) * core::size_of(dlogits.dtype);
  core::parallel_for(
      target.numel(), cpu::row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t t = target.as<std::int64_t>()[i * target.strides[0]];
          if (t == options.ignore_index) {
            std::memset(out.row(i), 0, row_bytes);
            continue;
          }
          const bool here = t >= slice.first && t < slice.first + classes;
          HWY_DYNAMIC_DISPATCH(LogitGradientRow)
          ({logits.dtype, rows.row(i), out.row(i), classes, here ? t - slice.first : -1,
            sums.get(i), gradients.get(i), base, extra, streamed});
        }
      });
  out.finish();
}

void CpuBackend::mse(View x, View target, View loss) const {
  cpu::for_each_run({cpu::in(x), cpu::in(target), cpu::out(loss)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(MseRun)(x.dtype, loss.dtype, data, n);
                    });
}

void CpuBackend::mse_backward(View x, View target, View dloss, View dx) const {
  cpu::for_each_run({cpu::in(x), cpu::in(target), cpu::in(dloss), cpu::out(dx)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(MseBackwardRun)(x.dtype, dloss.dtype, data, n);
                    });
}

void CpuBackend::bce_with_logits(View x, View target, View loss) const {
  cpu::for_each_run({cpu::in(x), cpu::in(target), cpu::out(loss)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(BceRun)(x.dtype, loss.dtype, data, n);
                    });
}

void CpuBackend::bce_with_logits_backward(View x, View target, View dloss, View dx) const {
  cpu::for_each_run({cpu::in(x), cpu::in(target), cpu::in(dloss), cpu::out(dx)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(BceBackwardRun)(x.dtype, dloss.dtype, data, n);
                    });
}

void CpuBackend::bce(View p, View target, View loss) const {
  cpu::for_each_run({cpu::in(p), cpu::in(target), cpu::out(loss)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(ProbabilityBceRun)(p.dtype, loss.dtype, data, n);
                    });
}

void CpuBackend::bce_backward(View p, View target, View dloss, View dp) const {
  cpu::for_each_run({cpu::in(p), cpu::in(target), cpu::in(dloss), cpu::out(dp)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(ProbabilityBceBackwardRun)
                      (p.dtype, dloss.dtype, data, n);
                    });
}

}  // namespace cairn::kernels
#endif
