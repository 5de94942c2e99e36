// The vector loop of an optimizer update over one chunk. Included once per instruction set, after
// cpu/simd.h.
//
// Dtypes are told apart inside the loop, once for each pack of vectors: the branches are always
// predicted and the loop waits for memory, whereas a loop for each of the 42 mixes of dtypes would
// be compiled for each rule and instruction set.
#if defined(CAIRN_KERNELS_CPU_UPDATE_LOOP_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_CPU_UPDATE_LOOP_H_
#undef CAIRN_KERNELS_CPU_UPDATE_LOOP_H_
#else
#define CAIRN_KERNELS_CPU_UPDATE_LOOP_H_
#endif

#include "cpu/simd.h"
#include "cpu/update.h"
#include "math/master.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// A few vectors.
template <int N>
struct Pack {
  Real of[N];
  HWY_INLINE Pack() {}  // NOLINT: a defaulted one would lack the instruction set
};

template <int N, class Io, class T>
HWY_INLINE Pack<N> load_pack(Io io, const T* p) {
  Pack<N> pack;
  for (int k = 0; k < N; ++k) pack.of[k] = io.load(p + k * kLanes<Real>);
  return pack;
}
template <int N, class Io>
HWY_INLINE Pack<N> load_pack(Io io, DType dtype, const void* p, std::int64_t i) {
  switch (dtype) {
    case DType::f16:
      return load_pack<N>(io, static_cast<const Half*>(p) + i);
    case DType::bf16:
      return load_pack<N>(io, static_cast<const BFloat16*>(p) + i);
    default:
      return load_pack<N>(io, static_cast<const float*>(p) + i);
  }
}

#if !CAIRN_NO_VECTORS
/// Twice as many 16-bit lanes as floats: what two vectors of floats become.
using TagU16s = hn::Repartition<std::uint16_t, TagF>;
using BitsF = hn::Vec<TagU>;

/// The upper halves of two vectors of 32-bit lanes, in order; and the lower ones.
HWY_INLINE hn::Vec<TagU16s> upper_halves(BitsF a, BitsF b) {
  const TagU16s d;
  return hn::ConcatOdd(d, hn::BitCast(d, b), hn::BitCast(d, a));
}
HWY_INLINE hn::Vec<TagU16s> lower_halves(BitsF a, BitsF b) {
  const TagU16s d;
  return hn::ConcatEven(d, hn::BitCast(d, b), hn::BitCast(d, a));
}

/// Bits whose upper half is the bf16 that is nearest, with ties to even; NaN stays NaN.
HWY_INLINE BitsF rounded_to_bf16(Floats x) {
  const TagU tu;
  const auto bits = hn::BitCast(tu, x.raw);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(tu, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(tu, 0x7fff)), odd);
  return hn::IfThenElse(hn::RebindMask(tu, x != x), hn::Or(bits, hn::Set(tu, 0x00400000u)),
                        rounded);
}

HWY_INLINE void store_halves(Whole<Floats>, hn::Vec<TagU16s> halves, void* p) {
  hn::StoreU(halves, TagU16s(), static_cast<std::uint16_t*>(p));
}
HWY_INLINE void leave_halves(Whole<Floats> io, hn::Vec<TagU16s> halves, void* p) {
  store_halves(io, halves, p);
}
HWY_INLINE void leave_halves(Streamed, hn::Vec<TagU16s> halves, void* p) {
  hn::Stream(halves, TagU16s(), static_cast<std::uint16_t*>(p));
}
#endif

/// Whether a pack of N vectors is stored as bf16 two vectors at a time.
template <int N, class T>
inline constexpr bool kByPairs = N % 2 == 0 && CAIRN_NO_VECTORS == 0 && std::is_same_v<T, BFloat16>;

template <int N, class Io, class T>
HWY_INLINE void store_pack(Io io, const Pack<N>& pack, T* p) {
  if constexpr (kByPairs<N, T>) {
    for (int k = 0; k < N; k += 2) {
      const auto a = rounded_to_bf16(pack.of[k]), b = rounded_to_bf16(pack.of[k + 1]);
      store_halves(io, upper_halves(a, b), p + k * kLanes<Real>);
    }
  } else {
    for (int k = 0; k < N; ++k) io.store(pack.of[k], p + k * kLanes<Real>);
  }
}
template <int N, class Io>
HWY_INLINE void store_pack(Io io, const Pack<N>& pack, DType dtype, void* p, std::int64_t i) {
  switch (dtype) {
    case DType::f16:
      return store_pack<N>(io, pack, static_cast<Half*>(p) + i);
    case DType::bf16:
      return store_pack<N>(io, pack, static_cast<BFloat16*>(p) + i);
    default:
      return store_pack<N>(io, pack, static_cast<float*>(p) + i);
  }
}

/// For what is not read soon.
template <int N, class Io, class T>
HWY_INLINE void leave_pack(Io io, const Pack<N>& pack, T* p) {
  if constexpr (kByPairs<N, T>) {
    for (int k = 0; k < N; k += 2) {
      const auto a = rounded_to_bf16(pack.of[k]), b = rounded_to_bf16(pack.of[k + 1]);
      leave_halves(io, upper_halves(a, b), p + k * kLanes<Real>);
    }
  } else {
    for (int k = 0; k < N; ++k) io.leave(pack.of[k], p + k * kLanes<Real>);
  }
}
template <int N, class Io>
HWY_INLINE void leave_pack(Io io, const Pack<N>& pack, DType dtype, void* p, std::int64_t i) {
  switch (dtype) {
    case DType::f16:
      return leave_pack<N>(io, pack, static_cast<Half*>(p) + i);
    case DType::bf16:
      return leave_pack<N>(io, pack, static_cast<BFloat16*>(p) + i);
    default:
      return leave_pack<N>(io, pack, static_cast<float*>(p) + i);
  }
}

// Truths kept as a bf16 weight and a remainder; see math/master.h.
#if CAIRN_NO_VECTORS
template <class Io>
HWY_INLINE double load_joined(Io, const BFloat16* weight, const std::int16_t* remainder) {
  return kernels::math::join_master(*weight, *remainder);
}
template <class Io>
HWY_INLINE void store_split(Io, double w, BFloat16* weight, std::int16_t* remainder) {
  kernels::math::split_master(static_cast<float>(w), *weight, *remainder);
}
#else
using TagI16 = hn::Rebind<std::int16_t, TagF>;

template <class Io>
HWY_INLINE Floats load_joined(Io, const BFloat16* weight, const std::int16_t* remainder) {
  const TagU tu;
  const auto high =
      hn::PromoteTo(tu, hn::LoadU(TagU16(), reinterpret_cast<const std::uint16_t*>(weight)));
  const auto low = hn::PromoteTo(TagI(), hn::LoadU(TagI16(), remainder));
  return hn::BitCast(TagF(), hn::Add(hn::ShiftLeft<16>(high), hn::BitCast(tu, low)));
}
/// The bits to split: those of w, or a NaN that no carry turns into a number.
HWY_INLINE BitsF bits_to_split(Floats w) {
  const TagU tu;
  const auto bits = hn::BitCast(tu, w.raw);
  const auto quiet = hn::Or(hn::And(bits, hn::Set(tu, 0xffff0000u)), hn::Set(tu, 0x00400000u));
  return hn::IfThenElse(hn::RebindMask(tu, w != w), quiet, bits);
}
template <class Io>
HWY_INLINE void store_split(Io, Floats w, BFloat16* weight, std::int16_t* remainder) {
  const TagI ti;
  const auto bits = bits_to_split(w);
  const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(TagU(), 0x8000u)));
  const auto low = hn::ShiftRight<16>(hn::BitCast(ti, hn::ShiftLeft<16>(bits)));
  hn::StoreU(hn::DemoteTo(TagU16(), hn::BitCast(ti, high)), TagU16(),
             reinterpret_cast<std::uint16_t*>(weight));
  hn::StoreU(hn::DemoteTo(TagI16(), low), TagI16(), remainder);
}
template <class Io>
HWY_INLINE void store_split_pair(Io io, Floats first, Floats second, BFloat16* weight,
                                 std::int16_t* remainder) {
  const auto half = hn::Set(TagU(), 0x8000u);
  const auto a = bits_to_split(first), b = bits_to_split(second);
  store_halves(io, upper_halves(hn::Add(a, half), hn::Add(b, half)), weight);
  store_halves(io, lower_halves(a, b), remainder);
}
HWY_INLINE Floats load_joined(Part io, const BFloat16* weight, const std::int16_t* remainder) {
  BFloat16 high[kLanes<Floats>] = {};
  std::int16_t low[kLanes<Floats>] = {};
  std::memcpy(high, weight, static_cast<std::size_t>(io.count) * 2);
  std::memcpy(low, remainder, static_cast<std::size_t>(io.count) * 2);
  return load_joined(Whole<Floats>{}, high, low);
}
HWY_INLINE void store_split(Part io, Floats w, BFloat16* weight, std::int16_t* remainder) {
  BFloat16 high[kLanes<Floats>];
  std::int16_t low[kLanes<Floats>];
  store_split(Whole<Floats>{}, w, high, low);
  std::memcpy(weight, high, static_cast<std::size_t>(io.count) * 2);
  std::memcpy(remainder, low, static_cast<std::size_t>(io.count) * 2);
}
#endif

template <int N, class Io>
HWY_INLINE Pack<N> load_truth(Io io, const UpdateChunk& c, std::int64_t i) {
  if (c.master == nullptr) return load_pack<N>(io, c.weight_dtype, c.weight, i);
  if (c.master_dtype == DType::f32) {
    return load_pack<N>(io, static_cast<const float*>(c.master) + i);
  }
  const auto* high = static_cast<const BFloat16*>(c.weight) + i;
  const auto* low = static_cast<const std::int16_t*>(c.master) + i;
  Pack<N> pack;
  for (int k = 0; k < N; ++k) {
    pack.of[k] = load_joined(io, high + k * kLanes<Real>, low + k * kLanes<Real>);
  }
  return pack;
}

template <int N, class Io>
HWY_INLINE void store_truth(Io io, const Pack<N>& pack, const UpdateChunk& c, std::int64_t i) {
  if (c.master == nullptr) return store_pack<N>(io, pack, c.weight_dtype, c.weight, i);
  if (c.master_dtype == DType::f32) {
    store_pack<N>(io, pack, static_cast<float*>(c.master) + i);
    return leave_pack<N>(io, pack, c.weight_dtype, c.weight, i);
  }
  auto* high = static_cast<BFloat16*>(c.weight) + i;
  auto* low = static_cast<std::int16_t*>(c.master) + i;
  if constexpr (kByPairs<N, BFloat16>) {
    for (int k = 0; k < N; k += 2) {
      store_split_pair(io, pack.of[k], pack.of[k + 1], high + k * kLanes<Real>,
                       low + k * kLanes<Real>);
    }
  } else {
    for (int k = 0; k < N; ++k) {
      store_split(io, pack.of[k], high + k * kLanes<Real>, low + k * kLanes<Real>);
    }
  }
}

/// Bytes ahead of the loop at which memory is asked for: with as many streams as an update reads,
/// that gains up to a tenth over the processor's own prefetching (1 and 3 KiB gain less).
inline constexpr std::int64_t kAhead = 2048;

template <int N>
HWY_INLINE void prefetch(const void* p, DType dtype, std::int64_t i) {
  if (N == 1 || p == nullptr) return;
  const auto size = static_cast<std::int64_t>(core::size_of(dtype));
  const char* const from = static_cast<const char*>(p) + i * size + kAhead;
  for (std::int64_t k = 0; k < N * kLanes<Real> * size; k += 64) hwy::Prefetch(from + k);
}
template <int N>
HWY_INLINE void prefetch_truth(const UpdateChunk& c, std::int64_t i) {
  prefetch<N>(c.master, c.master_dtype, i);
  if (c.master == nullptr || c.master_dtype == DType::i16) {
    prefetch<N>(c.weight, c.weight_dtype, i);
  }
}

/// g of every rule, from the gradient as it lies.
struct Prepared {
  Real scale, l2;
  HWY_INLINE explicit Prepared(const EntryScalars& s) : scale(s.scale), l2(s.l2) {}
  HWY_INLINE Real operator()(Real gradient, Real w) const { return fma(l2, w, gradient * scale); }
};

/// Calls body(io, pack size, i) so that every element of a chunk is visited once.
template <int N>
struct PackSize {
  static constexpr int value = N;
};
template <class Body>
HWY_INLINE void for_packs(std::int64_t begin, std::int64_t n, const Body& body) {
  constexpr int kPack = 4;
  std::int64_t i = begin;
  for (; i + kPack * kLanes<Real> <= n; i += kPack * kLanes<Real>) {
    body(Whole<Real>{}, PackSize<kPack>{}, i);
  }
  for (; i + kLanes<Real> <= n; i += kLanes<Real>) body(Whole<Real>{}, PackSize<1>{}, i);
  if constexpr (kLanes < Real >> 1) {
    if (i < n) body(Part{n - i}, PackSize<1>{}, i);
  }
}
/// The same where io.leave() goes to a half tensor `left`, past the caches.
template <class Body>
HWY_INLINE void for_streamed_packs(std::int64_t n, const void* left, const Body& body) {
  if constexpr (kLanes < Real >> 1) {
    constexpr int kPack = 4;
    constexpr std::uintptr_t kBytes = kLanes<Real> * 4;  // a whole vector, which two become
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(left) % kBytes;
    const auto head = past == 0 ? 0 : static_cast<std::int64_t>((kBytes - past) / 2);
    std::int64_t i = head < n ? head : n;
    for_packs(0, i, body);
    for (; i + kPack * kLanes<Real> <= n; i += kPack * kLanes<Real>) {
      body(Streamed{}, PackSize<kPack>{}, i);
    }
    for_packs(i, n, body);
    hwy::FlushStream();
  } else {
    for_packs(0, n, body);
  }
}

/// The same for a body that ends with store_truth().
template <class Body>
HWY_INLINE void for_update_packs(const UpdateChunk& c, const Body& body) {
  const bool leaves = c.streamed && c.master != nullptr && c.master_dtype == DType::f32 &&
                      core::is_half(c.weight_dtype);
  if (leaves) {
    for_streamed_packs(c.count, c.weight, body);
  } else {
    for_packs(0, c.count, body);
  }
}

/// One pass over a chunk: every load, the rule, every store.
template <class Rule>
HWY_INLINE void update_chunk(const UpdateChunk& c, const Rule& rule) {
  const Prepared prepared(c.scalars);
  const Real inverse(c.scalars.inverse);
  const auto body = [&](auto io, auto size, std::int64_t i) HWY_ATTR {
    constexpr int N = decltype(size)::value;
    prefetch<N>(c.gradient, c.gradient_dtype, i);
    prefetch_truth<N>(c, i);
    prefetch<N>(c.moment1, c.moment_dtype, i);
    prefetch<N>(c.moment2, c.moment_dtype, i);
    const Pack<N> gradient = load_pack<N>(io, c.gradient_dtype, c.gradient, i);
    Pack<N> w = load_truth<N>(io, c, i);
    Pack<N> moment1, moment2;
    if (c.moment1 != nullptr) moment1 = load_pack<N>(io, c.moment_dtype, c.moment1, i);
    if (c.moment2 != nullptr) moment2 = load_pack<N>(io, c.moment_dtype, c.moment2, i);
    for (int k = 0; k < N; ++k) {
      rule.update(prepared(gradient.of[k], w.of[k]), inverse, moment1.of[k], moment2.of[k],
                  w.of[k]);
    }
    if (c.moment1 != nullptr) store_pack<N>(io, moment1, c.moment_dtype, c.moment1, i);
    if (c.moment2 != nullptr) store_pack<N>(io, moment2, c.moment_dtype, c.moment2, i);
    store_truth<N>(io, w, c, i);
  };
  for_update_packs(c, body);
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();
#endif
