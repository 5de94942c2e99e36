// check_gradients: one pass over its tensors, at the speed of memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/multi_tensor.cpp"
#include "cpu/targets.h"
// ---
#include <cmath>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/cpu_backend.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// A sum of squares in f64, where the square of no finite float overflows.
class SquareSum {
 public:
#if CAIRN_NO_VECTORS
  HWY_INLINE void add(double x) {
    total_ += x * x;
  }
  HWY_INLINE double total() const {
    return total_;
  }

 private:
  double total_ = 0.0;
#else
  HWY_INLINE SquareSum() : low_(hn::Zero(Tag())), high_(hn::Zero(Tag())) {}
  HWY_INLINE void add(Floats x) {
    const auto low = hn::PromoteTo(d_, hn::LowerHalf(x.raw));
    const auto high = hn::PromoteTo(d_, hn::UpperHalf(hn::Half<TagF>(), x.raw));
    low_ = hn::MulAdd(low, low, low_);
    high_ = hn::MulAdd(high, high, high_);
  }
  HWY_INLINE double total() const {
    return hn::GetLane(hn::SumOfLanes(d_, hn::Add(low_, high_)));
  }

 private:
  using Tag = hn::Repartition<double, TagF>;
  Tag d_;
  hn::Vec<Tag> low_, high_;
#endif
};

template <class T>
double square_sum(const T* x, std::int64_t n) {
  constexpr std::int64_t kStep = 2 * kLanes<Real>;
  SquareSum a, b;
  const Whole<Real> io;
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    a.add(io.load(x + i));
    b.add(io.load(x + i + kLanes<Real>));
  }
  for_vectors<Real>(n - i,
                    [&](auto part, std::int64_t k) HWY_ATTR { a.add(part.load(x + i + k)); });
  return a.total() + b.total();
}

/// Not finite if and only if an element is not.
double SquareSumOf(DType dtype, const void* x, std::int64_t n) {
  switch (dtype) {
    case DType::f16:
      return square_sum(static_cast<const Half*>(x), n);
    case DType::bf16:
      return square_sum(static_cast<const BFloat16*>(x), n);
    default:
      return square_sum(static_cast<const float*>(x), n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(SquareSumOf);

namespace {

/// Sums the finite elements' squares and counts the others.
double finite_square_sum(const TensorView& x, const cpu::Chunk& chunk, std::int64_t& nonfinite,
                         bool& nan) {
  double total = 0.0;
  core::dispatch_floating(x.dtype, "check_gradients", [&](auto zero) {
    const auto* p = x.as<decltype(zero)>() + chunk.begin;
    for (std::int64_t i = 0; i < chunk.count; ++i) {
      const double v = static_cast<float>(p[i]);
      if (std::isfinite(v)) {
        total += v * v;
      } else {
        ++nonfinite;
        nan = nan || std::isnan(v);
      }
    }
  });
  return total;
}

struct ChunkCheck {
  double squared_norm = 0.0;
  std::int64_t nonfinite = 0;
  bool nan = false;
};

ChunkCheck check_chunk(const TensorView& x, const cpu::Chunk& chunk) {
  ChunkCheck check;
  check.squared_norm =
      HWY_DYNAMIC_DISPATCH(SquareSumOf)(x.dtype, cpu::bytes_at(x, chunk.begin), chunk.count);
  if (!std::isfinite(check.squared_norm)) {
    check.squared_norm = finite_square_sum(x, chunk, check.nonfinite, check.nan);
  }
  return check;
}

}  // namespace

GradientCheck CpuBackend::check_gradients(const std::vector<TensorView>& gradients,
                                          bool per_tensor_norms) const {
  const std::vector<cpu::Chunk> chunks =
      cpu::cut(gradients.size(), [&](std::size_t i) { return gradients[i].numel(); });
  std::vector<ChunkCheck> checks(chunks.size());
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          checks[k] = check_chunk(gradients[chunks[k].tensor], chunks[k]);
        }
      });
  GradientCheck result;
  if (per_tensor_norms) result.squared_norms.resize(gradients.size());
  for (std::size_t k = 0; k < chunks.size(); ++k) {
    const auto tensor = static_cast<std::int64_t>(chunks[k].tensor);
    result.squared_norm += checks[k].squared_norm;
    if (per_tensor_norms) result.squared_norms[chunks[k].tensor] += checks[k].squared_norm;
    if (checks[k].nonfinite == 0) continue;
    if (result.first_nonfinite < 0) result.first_nonfinite = tensor;
    if (result.first_nonfinite != tensor) continue;
    result.nonfinite_count += checks[k].nonfinite;
    result.is_nan = result.is_nan || checks[k].nan;
  }
  return result;
}

}  // namespace cairn::kernels
#endif
