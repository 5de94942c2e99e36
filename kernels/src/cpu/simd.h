// Highway vectors behind the number type that the formulas of math/ use, and loads and stores that
// convert to and from every floating dtype. Included once per instruction set, after
// hwy/foreach_target.h:
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "cpu/elementwise.cpp"
//   #include "cpu/targets.h"
//   #include "cpu/simd.h"
//
// for_vectors<V>(n, body) runs body(io, i) for i = 0, lanes, 2 lanes, ...: `io` loads and stores
// whole vectors or the last few elements, so a loop is written once. V is Floats (computing in f32)
// or double (one lane; f64 is for checking, not for speed).
#if defined(CAIRN_KERNELS_CPU_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_CPU_SIMD_H_
#undef CAIRN_KERNELS_CPU_SIMD_H_
#else
#define CAIRN_KERNELS_CPU_SIMD_H_
#endif

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cairn/core/dtype.h"
#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "math/functions.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using core::BFloat16;
using core::Half;

using TagF = hn::ScalableTag<float>;
using TagI = hn::RebindToSigned<TagF>;
using TagU = hn::RebindToUnsigned<TagF>;
using TagU16 = hn::Rebind<std::uint16_t, TagF>;
using TagF16 = hn::Rebind<hwy::float16_t, TagF>;

/// A vector of floats.
struct Floats {
  using Raw = hn::Vec<TagF>;
  Raw raw;

  HWY_INLINE Floats() : raw(hn::Zero(TagF())) {}
  HWY_INLINE Floats(Raw raw) : raw(raw) {}  // NOLINT: Highway's results pass as they are
  HWY_INLINE explicit Floats(double x) : raw(hn::Set(TagF(), static_cast<float>(x))) {}
};
using Mask = hn::Mask<TagF>;

template <class V>
inline constexpr std::int64_t kLanes = 1;
template <>
inline constexpr std::int64_t kLanes<Floats> = static_cast<std::int64_t>(hn::MaxLanes(TagF()));

/// What f16, bf16 and f32 are computed in; double where there are no vectors, since one lane makes
/// for long sums.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#undef CAIRN_NO_VECTORS
#define CAIRN_NO_VECTORS 1
using Real = double;
#else
#undef CAIRN_NO_VECTORS
#define CAIRN_NO_VECTORS 0
using Real = Floats;
#endif
/// What elements of type T are computed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, Real>;
/// What two dtypes are computed in together.
template <class T, class U>
using Compute2 =
    std::conditional_t<std::is_same_v<T, double> || std::is_same_v<U, double>, double, Real>;

// double's, beside the vectors' below.
using math::abs;
using math::exp;
using math::fma;
using math::log;
using math::log1p;
using math::max;
using math::min;
using math::normal_distribution;
using math::pow;
using math::select;
using math::sqrt;
using math::tanh;

HWY_INLINE Floats operator+(Floats a, Floats b) {
  return hn::Add(a.raw, b.raw);
}
HWY_INLINE Floats operator-(Floats a, Floats b) {
  return hn::Sub(a.raw, b.raw);
}
HWY_INLINE Floats operator*(Floats a, Floats b) {
  return hn::Mul(a.raw, b.raw);
}
HWY_INLINE Floats operator/(Floats a, Floats b) {
  return hn::Div(a.raw, b.raw);
}
HWY_INLINE Floats operator-(Floats a) {
  return hn::Neg(a.raw);
}
HWY_INLINE Mask operator<(Floats a, Floats b) {
  return hn::Lt(a.raw, b.raw);
}
HWY_INLINE Mask operator>(Floats a, Floats b) {
  return hn::Gt(a.raw, b.raw);
}
HWY_INLINE Mask operator<=(Floats a, Floats b) {
  return hn::Le(a.raw, b.raw);
}
HWY_INLINE Mask operator>=(Floats a, Floats b) {
  return hn::Ge(a.raw, b.raw);
}
HWY_INLINE Mask operator==(Floats a, Floats b) {
  return hn::Eq(a.raw, b.raw);
}
HWY_INLINE Mask operator!=(Floats a, Floats b) {  // true with NaN, which Highway 1.0's Ne is not
  return hn::Not(hn::Eq(a.raw, b.raw));
}

HWY_INLINE Floats select(Mask mask, Floats a, Floats b) {
  return hn::IfThenElse(mask, a.raw, b.raw);
}
HWY_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return hn::MulAdd(a.raw, b.raw, c.raw);
}
HWY_INLINE Floats sqrt(Floats x) {
  return hn::Sqrt(x.raw);
}
HWY_INLINE Floats abs(Floats x) {
  return hn::Abs(x.raw);
}
HWY_INLINE Floats max(Floats a, Floats b) {
  return select(a != a, a, select(a > b, a, b));
}
HWY_INLINE Floats min(Floats a, Floats b) {
  return select(a != a, a, select(a < b, a, b));
}

/// exp(r) - 1 of r = x - n ln 2 in [-0.35, 0.35] (fitted here: error 3e-9 before rounding).
HWY_INLINE Floats expm1_reduced(Floats x, Floats n) {
  const Floats r = fma(n, Floats(-1.428606765330187e-6), fma(n, Floats(-0.693145751953125), x));
  Floats q = fma(Floats(0.001381314454319266), r, Floats(0.008369418831737512));
  q = fma(q, r, Floats(0.04166845678659069));
  q = fma(q, r, Floats(0.16666514791440312));
  q = fma(q, r, Floats(0.4999999305072867));
  return fma(q, r * r, r);
}

/// The rounded n = x / ln 2, and exp(x - n ln 2) in [0.7, 1.42].
HWY_INLINE Floats exp_reduced(Floats x, Floats& n) {
  n = Floats(hn::Round((x * Floats(1.44269504088896)).raw));
  return expm1_reduced(x, n) + Floats(1.0);
}

/// p 2^n for integral n; overflows to infinity, underflows through the subnormals to 0.
HWY_INLINE Floats scale_by_power(Floats p, Floats n) {
#if HWY_TARGET == HWY_AVX3
  return Floats::Raw{_mm512_scalef_ps(p.raw.raw, n.raw.raw)};
#else
  const TagI ti;
  const auto k = hn::ConvertTo(ti, n.raw);
  const auto half = hn::ShiftRight<1>(k);
  const auto bias = hn::Set(ti, 127);
  const auto power = [&](auto e) HWY_ATTR {
    return Floats(hn::BitCast(TagF(), hn::ShiftLeft<23>(hn::Add(e, bias))));
  };
  return p * power(half) * power(hn::Sub(k, half));
#endif
}

HWY_INLINE Floats exp(Floats x) {
  // The order of the operands lets NaN through on x86.
  const Floats limited(hn::Max(hn::Set(TagF(), -104.0f), hn::Min(hn::Set(TagF(), 89.0f), x.raw)));
  Floats n;
  const Floats p = exp_reduced(limited, n);
  const Floats y = scale_by_power(p, n);
#if HWY_ARCH_X86
  return y;
#else
  return select(x != x, x, y);  // elsewhere no order does
#endif
}

HWY_INLINE Floats log(Floats x) {
  const double inf = std::numeric_limits<double>::infinity();
  const Floats y(hn::Log(TagF(), x.raw));
  const Floats edge =
      select(x == Floats(0.0), Floats(-inf),
             select(x > Floats(0.0), x, Floats(std::numeric_limits<double>::quiet_NaN())));
  return select(hn::And(x > Floats(0.0), x < Floats(inf)), y, edge);
}

HWY_INLINE Floats log1p(Floats x) {
  return hn::Log1p(TagF(), x.raw);
}  // for x > -1

/// e / (e + 2) of e = exp(2 |x|) - 1, with the sign of x: within 2.7 units in the last place.
HWY_INLINE Floats tanh(Floats x) {
  const Floats u(hn::Min(hn::Set(TagF(), 20.0f), abs(x + x).raw));  // lets NaN through on x86
  // 1.5 2^23 rounds what is added to it to an integer: n + 127, 2^n's exponent, in its last bits.
  const Floats rounding(12582912.0 + 127.0);
  const Floats k = fma(u, Floats(1.44269504088896), rounding);
  const Floats power(hn::BitCast(TagF(), hn::ShiftLeft<23>(hn::BitCast(TagU(), k.raw))));
  const Floats e = fma(power, expm1_reduced(u, k - rounding), power - Floats(1.0));
  const Floats y(hn::CopySignToAbs((e / (e + Floats(2.0))).raw, x.raw));
#if HWY_ARCH_X86
  return y;
#else
  return select(x != x, x, y);  // elsewhere no order of Min's operands does
#endif
}

/// cdf and density of the standard normal distribution from one exponential. The tail beyond z =
/// |x| is exp(-z^2 / 2) t P(t) with t = 1 / (1 + 0.35 z); P is fitted here to erfcx (relative
/// error 3.2e-8 for z <= 14.5, where the exponential is 0).
HWY_INLINE math::Normal<Floats> normal_distribution(Floats x) {
  const Floats z = abs(x);
  const Floats e = exp(Floats(-0.5) * x * x);
  const Floats t = Floats(1.0) / fma(Floats(0.35), z, Floats(1.0));
  Floats p = fma(Floats(-0.029157896979050996), t, Floats(0.1440309731134482));
  p = fma(p, t, Floats(-0.25583911200965154));
  p = fma(p, t, Floats(0.15931981540209375));
  p = fma(p, t, Floats(-0.023212433277312816));
  p = fma(p, t, Floats(0.1055525346380406));
  p = fma(p, t, Floats(0.11982127987689302));
  p = fma(p, t, Floats(0.1398635164637631));
  p = fma(p, t, Floats(0.13962130678584442));
  const Floats tail = e * t * p;
  return {select(x < Floats(0.0), tail, Floats(1.0) - tail), Floats(0.39894228040143268) * e};
}

/// Lane by lane: no vector form is as exact.
HWY_INLINE Floats pow(Floats x, Floats y) {
  HWY_ALIGN float xs[kLanes<Floats>], ys[kLanes<Floats>];
  hn::Store(x.raw, TagF(), xs);
  hn::Store(y.raw, TagF(), ys);
  for (std::int64_t i = 0; i < kLanes<Floats>; ++i) xs[i] = ::powf(xs[i], ys[i]);
  return hn::Load(TagF(), xs);
}

/// The larger of two numbers; with NaN, either.
HWY_INLINE Floats larger(Floats a, Floats b) {
  return hn::Max(a.raw, b.raw);
}
HWY_INLINE double larger(double a, double b) {
  return a > b ? a : b;
}

// Across the lanes.
HWY_INLINE float sum_of(Floats x) {
  return hn::GetLane(hn::SumOfLanes(TagF(), x.raw));
}
HWY_INLINE double sum_of(double x) {
  return x;
}
HWY_INLINE float max_of(Floats x) {
  return hn::GetLane(hn::MaxOfLanes(TagF(), x.raw));
}
HWY_INLINE double max_of(double x) {
  return x;
}

// Whole vectors from memory, and back with rounding to nearest even.
template <class V, class T>
HWY_INLINE V load(const T* p) {
  if constexpr (std::is_same_v<V, double>) {
    if constexpr (std::is_same_v<T, double>)
      return *p;
    else
      return static_cast<double>(static_cast<float>(*p));
  } else if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(TagF(), p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = hn::LoadU(TagU16(), reinterpret_cast<const std::uint16_t*>(p));
    return hn::BitCast(TagF(), hn::ShiftLeft<16>(hn::PromoteTo(TagU(), bits)));
  } else {
    static_assert(std::is_same_v<T, Half>);
    return hn::PromoteTo(TagF(), hn::LoadU(TagF16(), reinterpret_cast<const hwy::float16_t*>(p)));
  }
}

HWY_INLINE hn::Vec<TagU16> bf16_bits(Floats x) {
  const TagU tu;
  const auto bits = hn::BitCast(tu, x.raw);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(tu, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(tu, 0x7fff)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(tu, 0x40));
  const auto nan = hn::RebindMask(tu, x != x);
  return hn::DemoteTo(TagU16(), hn::BitCast(TagI(), hn::IfThenElse(nan, quiet, rounded)));
}

template <class V, class T>
HWY_INLINE void store(V x, T* p) {
  if constexpr (std::is_same_v<V, double>) {
    if constexpr (std::is_same_v<T, double>)
      *p = x;
    else
      *p = static_cast<T>(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, float>) {
    hn::StoreU(x.raw, TagF(), p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    hn::StoreU(bf16_bits(x), TagU16(), reinterpret_cast<std::uint16_t*>(p));
  } else {
    static_assert(std::is_same_v<T, Half>);
    hn::StoreU(hn::DemoteTo(TagF16(), x.raw), TagF16(), reinterpret_cast<hwy::float16_t*>(p));
  }
}

/// Writes a vector past the caches, to memory that nothing reads soon; p is aligned to the vector.
/// hwy::FlushStream() ends a series.
template <class T>
HWY_INLINE void stream(Floats x, T* p) {
  if constexpr (std::is_same_v<T, float>) {
    hn::Stream(x.raw, TagF(), p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    hn::Stream(bf16_bits(x), TagU16(), reinterpret_cast<std::uint16_t*>(p));
  } else {
    static_assert(std::is_same_v<T, Half>);
    hn::Stream(hn::BitCast(TagU16(), hn::DemoteTo(TagF16(), x.raw)), TagU16(),
               reinterpret_cast<std::uint16_t*>(p));
  }
}

/// Reads and writes whole vectors.
template <class V>
struct Whole {
  template <class T>
  HWY_INLINE V load(const T* p) const {
    return HWY_NAMESPACE::load<V>(p);
  }
  template <class T>
  HWY_INLINE void store(V x, T* p) const {
    HWY_NAMESPACE::store(x, p);
  }
  /// Stores what is not read soon.
  template <class T>
  HWY_INLINE void leave(V x, T* p) const {
    HWY_NAMESPACE::store(x, p);
  }
  /// `x`, with lanes beyond the end replaced by `neutral`.
  HWY_INLINE V keep(V x, V) const { return x; }
};

/// Whole vectors, where leave() writes past the caches.
struct Streamed : Whole<Floats> {
  template <class T>
  HWY_INLINE void leave(Floats x, T* p) const {
    stream(x, p);
  }
};

/// Whether a few elements of T can be read and written under a mask.
template <class T>
inline constexpr bool kMasked = HWY_TARGET == HWY_AVX3 ||
                                (HWY_TARGET == HWY_AVX2 && std::is_same_v<T, float>);

/// Reads and writes the first `count` lanes; the others read as 0.
struct PartialVector {
  std::int64_t count;

  template <class Tag>
  HWY_INLINE hn::Mask<Tag> mask(Tag tag) const {
    return hn::FirstN(tag, static_cast<std::size_t>(count));
  }
  template <class T>
  HWY_INLINE Floats load(const T* p) const {
    HWY_ALIGN T lanes[kLanes<Floats>] = {};
    if constexpr (kMasked<T> && std::is_same_v<T, float>) {
      return hn::MaskedLoad(mask(TagF()), TagF(), p);
    } else if constexpr (kMasked<T>) {
      const auto* bits = reinterpret_cast<const std::uint16_t*>(p);
      hn::Store(hn::MaskedLoad(mask(TagU16()), TagU16(), bits), TagU16(),
                reinterpret_cast<std::uint16_t*>(lanes));
    } else {
      std::memcpy(lanes, p, static_cast<std::size_t>(count) * sizeof(T));
    }
    return HWY_NAMESPACE::load<Floats>(lanes);
  }
  template <class T>
  HWY_INLINE void store(Floats x, T* p) const {
    HWY_ALIGN T lanes[kLanes<Floats>];
    if constexpr (kMasked<T> && std::is_same_v<T, float>) {
      hn::BlendedStore(x.raw, mask(TagF()), TagF(), p);
      return;
    }
    HWY_NAMESPACE::store(x, lanes);
    if constexpr (kMasked<T>) {
      const auto bits = hn::Load(TagU16(), reinterpret_cast<const std::uint16_t*>(lanes));
      hn::BlendedStore(bits, mask(TagU16()), TagU16(), reinterpret_cast<std::uint16_t*>(p));
    } else {
      std::memcpy(p, lanes, static_cast<std::size_t>(count) * sizeof(T));
    }
  }
  template <class T>
  HWY_INLINE void leave(Floats x, T* p) const {
    store(x, p);
  }
  HWY_INLINE Floats keep(Floats x, Floats neutral) const {
    return select(hn::FirstN(TagF(), static_cast<std::size_t>(count)), x, neutral);
  }
};

template <class V, class Body>
HWY_INLINE void for_vectors(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kLanes<V> <= n; i += kLanes<V>) body(Whole<V>{}, i);
  if constexpr (kLanes < V >> 1) {
    if (i < n) body(PartialVector{n - i}, i);
  }
}

/// The same where io.leave() goes to `left`, which is written past the caches.
template <class V, class T, class Body>
HWY_INLINE void for_streamed_vectors(std::int64_t n, const T* left, const Body& body) {
  if constexpr (kLanes<V> == 1) {
    for_vectors<V>(n, body);
  } else {
    constexpr std::uintptr_t kBytes = kLanes<V> * sizeof(T);
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(left) % kBytes;
    const auto head = past == 0 ? 0 : static_cast<std::int64_t>((kBytes - past) / sizeof(T));
    std::int64_t i = head < n ? head : n;
    if (i > 0) body(PartialVector{i}, 0);
    for (; i + kLanes<V> <= n; i += kLanes<V>) body(Streamed{}, i);
    if (i < n) body(PartialVector{n - i}, i);
    hwy::FlushStream();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();
#endif
