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

template <int N, class Io, class T>
HWY_INLINE void store_pack(Io io, const Pack<N>& pack, T* p) {
  for (int k = 0; k < N; ++k) io.store(pack.of[k], p + k * kLanes<Real>);
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
template <int N, class Io>
HWY_INLINE void leave_pack(Io io, const Pack<N>& pack, DType dtype, void* p, std::int64_t i) {
  const auto leave = [&](auto* to) HWY_ATTR {
    for (int k = 0; k < N; ++k) io.leave(pack.of[k], to + k * kLanes<Real>);
  };
  switch (dtype) {
    case DType::f16:
      return leave(static_cast<Half*>(p) + i);
    case DType::bf16:
      return leave(static_cast<BFloat16*>(p) + i);
    default:
      return leave(static_cast<float*>(p) + i);
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
template <class Io>
HWY_INLINE void store_split(Io, Floats w, BFloat16* weight, std::int16_t* remainder) {
  const TagU tu;
  const TagI ti;
  auto bits = hn::BitCast(tu, w.raw);
  const auto quiet = hn::Or(hn::And(bits, hn::Set(tu, 0xffff0000u)), hn::Set(tu, 0x00400000u));
  bits = hn::IfThenElse(hn::RebindMask(tu, w != w), quiet, bits);
  const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(tu, 0x8000u)));
  const auto low = hn::ShiftRight<16>(hn::BitCast(ti, hn::ShiftLeft<16>(bits)));
  hn::StoreU(hn::DemoteTo(TagU16(), hn::BitCast(ti, high)), TagU16(),
             reinterpret_cast<std::uint16_t*>(weight));
  hn::StoreU(hn::DemoteTo(TagI16(), low), TagI16(), remainder);
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
  for (int k = 0; k < N; ++k) {
    store_split(io, pack.of[k], high + k * kLanes<Real>, low + k * kLanes<Real>);
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
    constexpr std::uintptr_t kBytes = kLanes<Real> * 2;
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(left) % kBytes;
    const auto head = past == 0 ? 0 : static_cast<std::int64_t>((kBytes - past) / 2);
    std::int64_t i = head < n ? head : n;
    if (i > 0) body(Part{i}, PackSize<1>{}, 0);
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
