// The vector loop of an optimizer update over one chunk. Included once per instruction set, after
// cpu/simd.h.
//
// The mixes of dtypes that training has most have loops of their own. In the others dtypes are told
// apart inside the loop, once for each pack of vectors: that takes up to 1.5 times as long, but a
// loop for each of the 42 mixes would be compiled for each rule and instruction set.
#if defined(CAIRN_KERNELS_CPU_UPDATE_LOOP_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_CPU_UPDATE_LOOP_H_
#undef CAIRN_KERNELS_CPU_UPDATE_LOOP_H_
#else
#define CAIRN_KERNELS_CPU_UPDATE_LOOP_H_
#endif

#include "cpu/simd.h"
#include "cpu/update.h"
#include "math/master.h"

#undef CAIRN_PACK_BODY
#define CAIRN_PACK_BODY HWY_ATTR __attribute__((always_inline))  // a call for each pack is dear

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
HWY_INLINE Floats load_joined(PartialVector io, const BFloat16* weight,
                              const std::int16_t* remainder) {
  BFloat16 high[kLanes<Floats>] = {};
  std::int16_t low[kLanes<Floats>] = {};
  std::memcpy(high, weight, static_cast<std::size_t>(io.count) * 2);
  std::memcpy(low, remainder, static_cast<std::size_t>(io.count) * 2);
  return load_joined(Whole<Floats>{}, high, low);
}
HWY_INLINE void store_split(PartialVector io, Floats w, BFloat16* weight, std::int16_t* remainder) {
  BFloat16 high[kLanes<Floats>];
  std::int16_t low[kLanes<Floats>];
  store_split(Whole<Floats>{}, w, high, low);
  std::memcpy(weight, high, static_cast<std::size_t>(io.count) * 2);
  std::memcpy(remainder, low, static_cast<std::size_t>(io.count) * 2);
}
#endif

template <int N, class Io>
HWY_INLINE Pack<N> load_truth(Io io, const UpdateTypes& types, const UpdateChunk& c,
                              std::int64_t i) {
  if (types.truth == Truth::weight) return load_pack<N>(io, types.weight, c.weight, i);
  if (types.truth == Truth::master) {
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
HWY_INLINE void store_truth(Io io, const Pack<N>& pack, const UpdateTypes& types,
                            const UpdateChunk& c, std::int64_t i) {
  if (types.truth == Truth::weight) return store_pack<N>(io, pack, types.weight, c.weight, i);
  if (types.truth == Truth::master) {
    store_pack<N>(io, pack, static_cast<float*>(c.master) + i);
    return leave_pack<N>(io, pack, types.weight, c.weight, i);
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

/// Bytes ahead of the loop at which memory is asked for; 0: that is left to the processor. With as
/// many streams as an update reads, processors with AVX-512 gain up to a tenth by it (at 1 and 3
/// KiB less), and one without loses as much.
inline constexpr std::int64_t kAhead = HWY_TARGET == HWY_AVX3 ? 2048 : 0;

template <int N>
HWY_INLINE void prefetch(const void* p, DType dtype, std::int64_t i) {
  if (kAhead == 0 || N == 1 || p == nullptr) return;
  const auto size = static_cast<std::int64_t>(core::size_of(dtype));
  const char* const from = static_cast<const char*>(p) + i * size + kAhead;
  for (std::int64_t k = 0; k < N * kLanes<Real> * size; k += 64) hwy::Prefetch(from + k);
}
template <int N>
HWY_INLINE void prefetch_truth(const UpdateTypes& types, const UpdateChunk& c, std::int64_t i) {
  if (types.truth == Truth::master) return prefetch<N>(c.master, DType::f32, i);
  if (types.truth == Truth::joined) prefetch<N>(c.master, DType::i16, i);
  prefetch<N>(c.weight, types.weight, i);
}

/// What an update reads.
template <int N>
HWY_INLINE void prefetch_all(const UpdateTypes& types, const UpdateChunk& c, std::int64_t i) {
  prefetch<N>(c.gradient, types.gradient, i);
  prefetch_truth<N>(types, c, i);
  prefetch<N>(c.moment1, types.moment, i);
  prefetch<N>(c.moment2, types.moment, i);
}

/// g of every rule, from the gradient as it lies.
struct Prepared {
  Real scale, l2;
  HWY_INLINE explicit Prepared(const EntryScalars& s) : scale(s.scale), l2(s.l2) {}
  HWY_INLINE Real operator()(Real gradient, Real w) const { return fma(l2, w, gradient * scale); }
};

/// Types that the compiler knows.
template <UpdateTypes kTypes>
struct Known {
  HWY_INLINE UpdateTypes get() const { return kTypes; }
};
/// Types that are told apart in the loop.
struct Told {
  UpdateTypes types;
  HWY_INLINE UpdateTypes get() const { return types; }
};

/// Calls loop(types), known ones for the mixes that training has most.
template <class Loop>
HWY_INLINE void with_types(const UpdateTypes& types, const Loop& loop) {
  if constexpr (kLanes < Real >> 1) {
    if (types == kPlain) return loop(Known<kPlain>{});
    if (types == kO2F16) return loop(Known<kO2F16>{});
    if (types == kO2BF16) return loop(Known<kO2BF16>{});
    if (types == kSumsF16) return loop(Known<kSumsF16>{});
    if (types == kSumsBF16) return loop(Known<kSumsBF16>{});
    if (types == kRemainder) return loop(Known<kRemainder>{});
    if (types == kCompact) return loop(Known<kCompact>{});
  }
  loop(Told{types});
}

/// Vectors of a pack: those of four tensors and the constants of a rule stay in 32 registers, or 16
/// under AVX2, where spilling them costs a quarter of the time.
inline constexpr int kPack = HWY_TARGET == HWY_AVX2 ? 2 : 4;
template <int N>
struct PackSize {
  static constexpr int value = N;
};

/// Calls body(types, io, pack size, i) for elements [begin, n), a vector at a time.
template <class Body>
HWY_NOINLINE void for_rest(Told types, std::int64_t begin, std::int64_t n, const Body& body) {
  std::int64_t i = begin;
  for (; i + kLanes<Real> <= n; i += kLanes<Real>) body(types, Whole<Real>{}, PackSize<1>{}, i);
  if constexpr (kLanes < Real >> 1) {
    if (i < n) body(types, PartialVector{n - i}, PackSize<1>{}, i);
  }
}
/// The same for all of a chunk, a pack at a time; Io: Whole or Streamed.
template <class Io, class Types, class Body>
HWY_INLINE void for_packs_from(std::int64_t head, Types types, const UpdateChunk& c,
                               const Body& body) {
  const Body own = body;  // which no store can change
  if (head > 0) for_rest(Told{c.types}, 0, head, body);
  std::int64_t i = head;
  for (; i + kPack * kLanes<Real> <= c.count; i += kPack * kLanes<Real>) {
    own(types, Io{}, PackSize<kPack>{}, i);
  }
  if (i < c.count) for_rest(Told{c.types}, i, c.count, body);
}
template <class Types, class Body>
HWY_INLINE void for_packs(Types types, const UpdateChunk& c, const Body& body) {
  for_packs_from<Whole<Real>>(0, types, c, body);
}

/// The same for a body that ends with store_truth(): a half weight beside an f32 master goes past
/// the caches where the chunk says so.
template <class Types, class Body>
HWY_INLINE void for_update_packs(Types types, const UpdateChunk& c, const Body& body) {
  if constexpr (kLanes < Real >> 1) {
    const UpdateTypes t = types.get();
    if (c.streamed && t.truth == Truth::master && core::is_half(t.weight)) {
      constexpr std::uintptr_t kBytes = kLanes<Real> * 4;  // a whole vector, which two become
      const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(c.weight) % kBytes;
      const auto head = past == 0 ? 0 : static_cast<std::int64_t>((kBytes - past) / 2);
      for_packs_from<Streamed>(head < c.count ? head : c.count, types, c, body);
      return hwy::FlushStream();
    }
  }
  for_packs(types, c, body);
}

/// One pass over a chunk: every load, the rule, every store.
template <class Rule>
HWY_INLINE void update_chunk(const UpdateChunk& c, const Rule& rule) {
  const Prepared prepared(c.scalars);
  const Real inverse(c.scalars.of_norm);
  const auto body = [=](auto types, auto io, auto size, std::int64_t i) CAIRN_PACK_BODY {
    constexpr int N = decltype(size)::value;
    const UpdateTypes t = types.get();
    prefetch_all<N>(t, c, i);
    const Pack<N> gradient = load_pack<N>(io, t.gradient, c.gradient, i);
    Pack<N> w = load_truth<N>(io, t, c, i);
    Pack<N> moment1, moment2;
    if (c.moment1 != nullptr) moment1 = load_pack<N>(io, t.moment, c.moment1, i);
    if (c.moment2 != nullptr) moment2 = load_pack<N>(io, t.moment, c.moment2, i);
    for (int k = 0; k < N; ++k) {
      rule.update(prepared(gradient.of[k], w.of[k]), inverse, moment1.of[k], moment2.of[k],
                  w.of[k]);
    }
    if (c.moment1 != nullptr) store_pack<N>(io, moment1, t.moment, c.moment1, i);
    if (c.moment2 != nullptr) store_pack<N>(io, moment2, t.moment, c.moment2, i);
    store_truth<N>(io, w, t, c, i);
  };
  with_types(c.types, [&](auto types) HWY_ATTR { for_update_packs(types, c, body); });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();
#endif
