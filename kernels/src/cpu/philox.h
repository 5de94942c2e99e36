// Philox in vectors, one lane per counter, and what dropout keeps of the words drawn. Included once
// per instruction set, as simd.h is.
#if defined(CAIRN_KERNELS_CPU_PHILOX_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_CPU_PHILOX_H_
#undef CAIRN_KERNELS_CPU_PHILOX_H_
#else
#define CAIRN_KERNELS_CPU_PHILOX_H_
#endif

#include <algorithm>

#include "cpu/simd.h"
#include "math/dropout.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR  // it cannot widen products
HWY_INLINE void philox_vector(std::uint64_t seed, std::uint64_t offset, std::uint64_t first,
                              std::uint32_t* words) {
  const auto drawn = core::philox(seed, offset, first);
  std::copy(drawn.begin(), drawn.end(), words);
}
#else
using Words = hn::Vec<TagU>;

struct Product {
  Words high, low;
};

/// The 64-bit product of every lane with a constant.
HWY_INLINE Product multiply(Words x, std::uint32_t constant) {
  const TagU tu;
  const hn::Repartition<std::uint64_t, TagU> tw;
  const auto factor = hn::Set(tu, constant);
  const auto even = hn::MulEven(x, factor);
  const auto odd = hn::MulEven(hn::BitCast(tu, hn::ShiftRight<32>(hn::BitCast(tw, x))), factor);
  return {hn::OddEven(hn::BitCast(tu, odd), hn::BitCast(tu, hn::ShiftRight<32>(even))),
          hn::OddEven(hn::BitCast(tu, hn::ShiftLeft<32>(odd)), hn::BitCast(tu, even))};
}

/// words[4 k + j] = philox(seed, offset, first + k)[j] for one vector of counters k.
HWY_INLINE void philox_vector(std::uint64_t seed, std::uint64_t offset, std::uint64_t first,
                              std::uint32_t* words) {
  const TagU tu;
  HWY_ALIGN std::uint32_t low[kLanes<Floats>], high[kLanes<Floats>];
  Words c0 = hn::Add(hn::Set(tu, static_cast<std::uint32_t>(first)), hn::Iota(tu, 0));
  Words c1 = hn::Set(tu, static_cast<std::uint32_t>(first >> 32));
  if (first >> 32 !=
      (first + kLanes<Floats> - 1) >> 32) {  // the counter's upper half changes inside
    for (std::int64_t k = 0; k < kLanes<Floats>; ++k) {
      const std::uint64_t index = first + static_cast<std::uint64_t>(k);
      low[k] = static_cast<std::uint32_t>(index);
      high[k] = static_cast<std::uint32_t>(index >> 32);
    }
    c0 = hn::Load(tu, low);
    c1 = hn::Load(tu, high);
  }
  Words c2 = hn::Set(tu, static_cast<std::uint32_t>(offset));
  Words c3 = hn::Set(tu, static_cast<std::uint32_t>(offset >> 32));
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Product p0 = multiply(c0, 0xD2511F53u), p1 = multiply(c2, 0xCD9E8D57u);
    c0 = hn::Xor(hn::Xor(p1.high, c1), hn::Set(tu, k0));
    c2 = hn::Xor(hn::Xor(p0.high, c3), hn::Set(tu, k1));
    c1 = p1.low;
    c3 = p0.low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  hn::StoreInterleaved4(c0, c1, c2, c3, tu, words);
}
#endif

/// Whether the elements that drew words[0], words[1], ... are kept.
template <class Io>
HWY_INLINE bool kept(Io, double, const std::uint32_t* words, std::uint32_t threshold) {
  return kernels::math::dropout_keeps(*words, threshold);
}
template <class Io>
HWY_INLINE Mask kept(Io io, Floats, const std::uint32_t* words, std::uint32_t threshold) {
  const Floats bits = io.load(reinterpret_cast<const float*>(words));
  const auto drawn = hn::BitCast(TagI(), hn::ShiftRight<8>(hn::BitCast(TagU(), bits.raw)));
  const auto least = hn::Set(TagI(), static_cast<std::int32_t>(threshold) - 1);
  return hn::RebindMask(TagF(), hn::Gt(drawn, least));
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();
#endif
