// Passes over lists at the speed of memory. Scaled copies and sums check each block, then combine
// it while it is in the first-level cache, so an argument may be overwritten.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/multi_tensor.cpp"
#include "cpu/targets.h"
// ---
#include <cmath>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/cpu_backend.h"
#include "cpu/linear_block.h"
#include "cpu/simd.h"
#include "cpu/tensor_checks.h"
#include "math/power_sum.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// Sums in f64 of what `Term` makes of each element, where the sum over no chunk of finite floats
/// overflows.
template <class Term>
class Sum {
 public:
#if CAIRN_NO_VECTORS
  HWY_INLINE void add(double x) {
    total_ = Term::add(x, total_);
  }
  HWY_INLINE double total() const {
    return total_;
  }

 private:
  double total_ = 0.0;
#else
  HWY_INLINE Sum() : low_(hn::Zero(Tag())), high_(hn::Zero(Tag())) {}
  HWY_INLINE void add(Floats x) {
    low_ = Term::add(hn::PromoteTo(d_, hn::LowerHalf(x.raw)), low_);
    high_ = Term::add(hn::PromoteTo(d_, hn::UpperHalf(hn::Half<TagF>(), x.raw)), high_);
  }
  HWY_INLINE double total() const {
    return hn::GetLane(hn::SumOfLanes(d_, hn::Add(low_, high_)));
  }

 private:
  using Tag = hn::Repartition<double, TagF>;
  Tag d_;
  hn::Vec<Tag> low_, high_;
#endif
 public:
  static HWY_INLINE double join(double a, double b) {
    return a + b;
  }
};

#if CAIRN_NO_VECTORS
struct Square {
  static HWY_INLINE double add(double x, double sum) { return sum + x * x; }
};
struct Absolute {
  static HWY_INLINE double add(double x, double sum) { return sum + abs(x); }
};
#else
struct Square {
  template <class V>
  static HWY_INLINE V add(V x, V sum) {
    return hn::MulAdd(x, x, sum);
  }
};
struct Absolute {
  template <class V>
  static HWY_INLINE V add(V x, V sum) {
    return hn::Add(sum, hn::Abs(x));
  }
};
#endif

/// The largest |x|; NaN where there is one.
class Largest {
 public:
  HWY_INLINE Largest() : largest_(0.0) {}
  HWY_INLINE void add(Real x) { largest_ = max(largest_, abs(x)); }
  HWY_INLINE double total() const {
    HWY_ALIGN float lanes[kLanes<Real>];
    store(largest_, lanes);
    double total = 0.0;
    for (float x : lanes) total = join(total, x);
    return total;
  }
  static HWY_INLINE double join(double a, double b) { return max(a, b); }

 private:
  Real largest_;
};

template <class Sum, class T>
double sum_of_powers(const T* x, std::int64_t n) {
  constexpr std::int64_t kStep = 2 * kLanes<Real>;
  Sum a, b;
  const Whole<Real> io;
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    a.add(io.load(x + i));
    b.add(io.load(x + i + kLanes<Real>));
  }
  for_vectors<Real>(n - i,
                    [&](auto part, std::int64_t k) HWY_ATTR { a.add(part.load(x + i + k)); });
  return Sum::join(a.total(), b.total());
}

template <class Sum, class T>
double sum_of_blocks(const T* x, std::int64_t n) {
  double total = 0.0;
  for (std::int64_t at = 0; at < n; at += kSumBlock)
    total = Sum::join(total, sum_of_powers<Sum>(x + at, std::min(kSumBlock, n - at)));
  return total;
}

template <class Sum>
double sum_of_blocks(DType dtype, const void* x, std::int64_t n) {
  switch (dtype) {
    case DType::f16:
      return sum_of_blocks<Sum>(static_cast<const Half*>(x), n);
    case DType::bf16:
      return sum_of_blocks<Sum>(static_cast<const BFloat16*>(x), n);
    default:
      return sum_of_blocks<Sum>(static_cast<const float*>(x), n);
  }
}

/// Of every kind but general powers, block after block. Not finite if and only if an element is
/// not.
double SumOfPowers(PowerSum::Kind kind, DType dtype, const void* x, std::int64_t n) {
  switch (kind) {
    case PowerSum::Kind::absolutes:
      return sum_of_blocks<Sum<Absolute>>(dtype, x, n);
    case PowerSum::Kind::largest:
      return sum_of_blocks<Largest>(dtype, x, n);
    default:
      return sum_of_blocks<Sum<Square>>(dtype, x, n);
  }
}

/// Calls f with the pointer, typed.
template <class F>
HWY_INLINE void with_type(DType dtype, void* data, const F& f) {
  switch (dtype) {
    case DType::f16:
      return f(static_cast<Half*>(data));
    case DType::bf16:
      return f(static_cast<BFloat16*>(data));
    default:
      return f(static_cast<float*>(data));
  }
}

template <class X, class Out>
void scale_block(const X* x, Out* out, std::int64_t n, double a) {
  const Real factor(a);
  for_vectors<Real>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(factor * io.load(x + i), out + i); });
}

template <class X, class Y, class Out>
void add_block(const X* x, const Y* y, Out* out, std::int64_t n, double a, double b) {
  const Real of_x(a), of_y(b);
  for_vectors<Real>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(fma(of_x, io.load(x + i), of_y * io.load(y + i)), out + i);
  });
}

void Combine(const LinearBlock& block) {
  with_type(block.x_dtype, block.x, [&](const auto* x) {
    with_type(block.out_dtype, block.out, [&](auto* out) {
      if (block.y == nullptr) return scale_block(x, out, block.count, block.a);
      with_type(block.y_dtype, block.y,
                [&](const auto* y) { add_block(x, y, out, block.count, block.a, block.b); });
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(SumOfPowers);
HWY_EXPORT(Combine);

namespace {

/// Element by element: general powers, and blocks with elements to count.
CheckPart check_elements(DType dtype, const void* x, std::int64_t n, const PowerSum& power) {
  CheckPart part{0.0, 0, 0};
  core::dispatch_floating(dtype, "check_tensors", [&](auto zero) {
    const auto* p = static_cast<const decltype(zero)*>(x);
    for (std::int64_t i = 0; i < n; ++i) part.see(static_cast<float>(p[i]), power);
  });
  return part;
}

}  // namespace

CheckPart cpu::check_run(DType dtype, const void* x, std::int64_t n, const PowerSum& power) {
  const bool vectors = power.kind() != PowerSum::Kind::powers;
  const auto sum_of = [&](const void* from, std::int64_t count) {
    return HWY_DYNAMIC_DISPATCH(SumOfPowers)(power.kind(), dtype, from, count);
  };
  if (vectors) {
    const double sum = sum_of(x, n);
    if (std::isfinite(sum)) return {sum, 0, 0};
  }
  CheckPart total{0.0, 0, 0};
  const JoinParts<PowerSum> join{power};
  for (std::int64_t at = 0; at < n; at += kSumBlock) {
    const void* from =
        static_cast<const char*>(x) + at * static_cast<std::int64_t>(core::size_of(dtype));
    const std::int64_t count = std::min(kSumBlock, n - at);
    const double sum = vectors ? sum_of(from, count) : HUGE_VAL;
    const bool counts = !std::isfinite(sum);
    total = join(total, counts ? check_elements(dtype, from, count, power) : CheckPart{sum, 0, 0});
  }
  return total;
}

void CpuBackend::check_tensors(const std::vector<TensorView>& tensors, double p,
                               TensorCheck* checks) const {
  const PowerSum power(p);
  const std::vector<cpu::Chunk> chunks = cpu::cut(
      tensors.size(), [&](std::size_t i) { return tensors[i].numel(); }, kSumChunk);
  std::vector<CheckPart> parts(chunks.size());
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 4, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          const TensorView& x = tensors[chunks[k].tensor];
          parts[k] =
              cpu::check_run(x.dtype, cpu::bytes_at(x, chunks[k].begin), chunks[k].count, power);
        }
      });
  cpu::join_chunks(chunks, parts, power, {checks, tensors.size()});
}

namespace {

constexpr std::int64_t kBlock = 4096;  // elements

LinearBlock block_at(const LinearLists& lists, const cpu::Chunk& chunk) {
  const auto at = [&](const TensorView& view) {
    return const_cast<char*>(cpu::bytes_at(view, chunk.begin));
  };
  const TensorView &x = lists.x[chunk.tensor], &out = lists.out[chunk.tensor];
  const TensorView y = lists.y.empty() ? TensorView() : lists.y[chunk.tensor];
  return {x.dtype, y.dtype,     out.dtype, at(x),  y.defined() ? at(y) : nullptr,
          at(out), chunk.count, lists.a,   lists.b};
}

CheckPart combine_chunk(const LinearLists& lists, const cpu::Chunk& chunk) {
  const PowerSum power(2.0);
  const JoinParts<PowerSum> join{power};
  CheckPart part{0.0, 0, 0};
  for (std::int64_t done = 0; done < chunk.count; done += kBlock) {
    const LinearBlock block =
        block_at(lists, {chunk.tensor, chunk.begin + done, std::min(kBlock, chunk.count - done)});
    if (lists.check_x) {
      part = join(part, cpu::check_run(block.x_dtype, block.x, block.count, power));
    }
    if (lists.check_y) {
      part = join(part, cpu::check_run(block.y_dtype, block.y, block.count, power));
    }
    HWY_DYNAMIC_DISPATCH(Combine)(block);
  }
  return part;
}

}  // namespace

void CpuBackend::multi_tensor_linear(const LinearLists& lists, TensorCheck* checks) const {
  const std::vector<cpu::Chunk> chunks =
      cpu::cut(lists.x.size(), [&](std::size_t i) { return lists.x[i].numel(); });
  std::vector<CheckPart> parts(chunks.size());
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          parts[k] = combine_chunk(lists, chunks[k]);
        }
      });
  cpu::join_chunks(chunks, parts, PowerSum(2.0), {checks, lists.x.size()});
}

}  // namespace cairn::kernels
#endif
