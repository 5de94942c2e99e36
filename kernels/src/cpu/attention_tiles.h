// What attention does with one tile: bringing rows into the layouts of products, the products, the
// exponential, the masks. Included once per instruction set, after cpu/simd.h.
#if defined(CAIRN_KERNELS_CPU_ATTENTION_TILES_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_CPU_ATTENTION_TILES_H_
#undef CAIRN_KERNELS_CPU_ATTENTION_TILES_H_
#else
#define CAIRN_KERNELS_CPU_ATTENTION_TILES_H_
#endif

#include <algorithm>

#include "cpu/attention_job.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

using cpu::attention::AttentionJob;
using cpu::attention::for_visible;
using cpu::attention::group_of;
using cpu::attention::KeepBits;
using cpu::attention::kTile;
using cpu::attention::Matrix;
using cpu::attention::Operand;
using cpu::attention::Pieces;
using cpu::attention::round_up;
using cpu::attention::Tile;
using cpu::attention::tiles_of;

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

/// 2^x for x <= 1, 0 below 2^-126 (polynomial fitted here: relative error 9e-8 before rounding).
HWY_INLINE Floats power_of_two(Floats x) {
  const Floats n(hn::Round(x.raw));
  const Floats r = x - n;
  Floats p = fma(Floats(0.0013264727165550585), r, Floats(0.0096715126419406));
  p = fma(p, r, Floats(0.055507337433573216));
  p = fma(p, r, Floats(0.24022242085325118));
  p = fma(p, r, Floats(0.6931469775990899));
  p = fma(p, r, Floats(1.0));
#if HWY_TARGET == HWY_AVX3
  p = Floats::Raw{_mm512_scalef_ps(p.raw.raw, n.raw.raw)};
#else
  const TagI ti;
  const auto exponent = hn::Add(hn::ConvertTo(ti, n.raw), hn::Set(ti, 127));
  p = p * Floats(hn::BitCast(TagF(), hn::ShiftLeft<23>(exponent)));
#endif
  return select(x < Floats(-126.0), Floats(0.0), p);  // NaN stays
}

// --- layouts

/// The rows of one head: [count, width], any strides.
template <class T>
struct HeadRows {
  T* data;
  std::int64_t count, width;
  std::int64_t row, element;  // strides

  T* at(std::int64_t i) const { return data + i * row; }
};

template <class T>
HeadRows<T> head_of(const TensorView& x, std::int64_t head) {
  const std::int64_t b = head / x.size(1), h = head % x.size(1);
  return {x.as<T>() + b * x.strides[0] + h * x.strides[1], x.size(2), x.size(3), x.strides[2],
          x.strides[3]};
}

template <class T, class E>
HWY_INLINE void convert(const T* x, E* y, std::int64_t n) {
  if constexpr (std::is_same_v<T, E>) {
    std::copy(x, x + n, y);
  } else {
    for_vectors<Floats>(n,
                        [&](auto io, std::int64_t i) HWY_ATTR { io.store(io.load(x + i), y + i); });
  }
}

/// Rows that lie apart are not foreseen by the processor.
template <class T>
HWY_INLINE void prefetch_row(const HeadRows<T>& head, std::int64_t i) {
  if (i >= head.count) return;
  for (std::int64_t d = 0; d < head.width; d += 64 / static_cast<std::int64_t>(sizeof(T))) {
    hwy::Prefetch(head.at(i) + d);
  }
}

/// Rows [first, first + count) of a head, then zeros up to a whole number of units.
template <class T, class E>
void load_rows(const HeadRows<T>& head, std::int64_t first, std::int64_t count,
               const Matrix<E>& to) {
  const std::int64_t width = round_up(head.width, Operand<E>::kUnit);
  for (std::int64_t i = 0; i < count; ++i) {
    const T* const x = head.at(first + i);
    E* const y = to.row(i);
    if (head.element == 1) {
      prefetch_row(head, first + i + 8);
      convert(x, y, head.width);
    } else {
      for (std::int64_t d = 0; d < head.width; ++d) {
        y[d] = E(static_cast<float>(x[d * head.element]));
      }
    }
    std::fill(y + head.width, y + width, E(0.0f));
  }
  for (std::int64_t i = count; i < round_up(count, Operand<E>::kUnit); ++i) {
    std::fill(to.row(i), to.row(i) + width, E(0.0f));
  }
}

/// Multiplied by `factor`.
template <class T>
void store_rows(const Matrix<float>& from, double factor, const HeadRows<T>& head,
                std::int64_t first, std::int64_t count) {
  const Floats scale(factor);
  for (std::int64_t i = 0; i < count; ++i) {
    const float* const x = from.row(i);
    T* const y = head.at(first + i);
    if (head.element == 1) {
      for_vectors<Floats>(head.width, [&](auto io, std::int64_t d)
                                          HWY_ATTR { io.store(scale * io.load(x + d), y + d); });
    } else {
      for (std::int64_t d = 0; d < head.width; ++d) {
        y[d * head.element] = T(static_cast<float>(factor) * x[d]);
      }
    }
  }
}

/// y [columns, rows] of x [rows, columns]: words of four bytes, both numbers multiples of 16.
template <class Word>
void transpose(const Matrix<Word>& x, std::int64_t rows, std::int64_t columns,
               const Matrix<Word>& y) {
  const TagU tu;
  HWY_ALIGN std::uint32_t quads[4 * kLanes<Floats>];
  const auto at = [&](std::int64_t i, std::int64_t j)
                      HWY_ATTR { return reinterpret_cast<const std::uint32_t*>(x.row(i) + j); };
  for (std::int64_t i = 0; i < rows; i += 4) {
    for (std::int64_t j = 0; j < columns; j += kLanes<Floats>) {
      hn::StoreInterleaved4(hn::LoadU(tu, at(i, j)), hn::LoadU(tu, at(i + 1, j)),
                            hn::LoadU(tu, at(i + 2, j)), hn::LoadU(tu, at(i + 3, j)), tu, quads);
      for (std::int64_t l = 0; l < kLanes<Floats>; ++l) {
        std::memcpy(y.row(j + l) + i, quads + 4 * l, 16);
      }
    }
  }
}

/// Words of the rows 2 i and 2 i + 1; of f32, the rows themselves.
HWY_INLINE void pair_rows(const Matrix<float>&, std::int64_t, std::int64_t, const Matrix<float>&) {}
inline void pair_rows(const Matrix<BFloat16>& x, std::int64_t rows, std::int64_t columns,
                      const Matrix<std::uint32_t>& y) {
  const TagU16 half;
  for (std::int64_t i = 0; i < rows; i += 2) {
    const auto* const even = reinterpret_cast<const std::uint16_t*>(x.row(i));
    const auto* const odd = reinterpret_cast<const std::uint16_t*>(x.row(i + 1));
    for (std::int64_t j = 0; j < columns; j += kLanes<Floats>) {
      const auto low = hn::PromoteTo(TagU(), hn::LoadU(half, even + j));
      const auto high = hn::PromoteTo(TagU(), hn::LoadU(half, odd + j));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), TagU(), y.row(i / 2) + j);
    }
  }
}

/// Elements as words, words as elements.
template <class E>
Matrix<typename Operand<E>::Word> as_words(const Matrix<E>& x) {
  return {reinterpret_cast<typename Operand<E>::Word*>(x.data), x.ld / Operand<E>::kPerWord};
}
template <class E>
Matrix<E> as_elements(const Matrix<typename Operand<E>::Word>& x) {
  return {reinterpret_cast<E*>(x.data), x.ld * Operand<E>::kPerWord};
}

/// bf16, rounded to nearest even, in the upper half. NaN whose lower half is not all ones stays
/// NaN; of sums and products of bf16 there are no others.
HWY_INLINE hn::Vec<TagU> rounded_bits(Floats x) {
  const TagU tu;
  const auto bits = hn::BitCast(tu, x.raw);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(tu, 1));
  return hn::Add(hn::Add(bits, hn::Set(tu, 0x7fff)), odd);
}

/// Rows k and k + 1 (k even) of a right-hand matrix, from column j on.
HWY_INLINE void store_words(Floats even, Floats odd, const Matrix<float>& y, std::int64_t k,
                            std::int64_t j) {
  store(even, y.row(k) + j);
  store(odd, y.row(k + 1) + j);
}
HWY_INLINE void store_words(Floats even, Floats odd, const Matrix<std::uint32_t>& y, std::int64_t k,
                            std::int64_t j) {
  const TagU tu;
  const auto low = hn::ShiftRight<16>(rounded_bits(even));
  const auto high = hn::And(rounded_bits(odd), hn::Set(tu, 0xffff0000u));
  hn::StoreU(hn::Or(low, high), tu, y.row(k / 2) + j);
}

HWY_INLINE void store_element(Floats x, float* y) {
  store(x, y);
}
HWY_INLINE void store_element(Floats x, BFloat16* y) {
  const auto bits = hn::BitCast(TagI(), hn::ShiftRight<16>(rounded_bits(x)));
  hn::StoreU(hn::DemoteTo(TagU16(), bits), TagU16(), reinterpret_cast<std::uint16_t*>(y));
}

// --- products

/// y [m, n] = a [m, k] b [k, n], or y += a b.
struct Extent {
  std::int64_t m, n, k;
  bool accumulate;
};

/// R rows of y, V vectors wide, in registers.
template <int R, int V>
HWY_INLINE void product_block(const Extent& size, const Matrix<float>& a, const Matrix<float>& b,
                              const Matrix<float>& y) {
  Floats sum[R][V];
  if (size.accumulate) {
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sum[r][v] = load<Floats>(y.row(r) + v * kLanes<Floats>);
    }
  }
  const float* column = b.data;
  for (std::int64_t k = 0; k < size.k; ++k, column += b.ld) {
    Floats right[V];
    for (int v = 0; v < V; ++v) right[v] = load<Floats>(column + v * kLanes<Floats>);
    for (int r = 0; r < R; ++r) {
      const Floats left(hn::Set(TagF(), a.data[r * a.ld + k]));
      for (int v = 0; v < V; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(sum[r][v], y.row(r) + v * kLanes<Floats>);
  }
}

/// V vectors of columns from j on.
template <int R, int V>
void product_columns(const Extent& size, const Matrix<float>& a, const Matrix<float>& b,
                     const Matrix<float>& y, std::int64_t j) {
  for (std::int64_t i = 0; i < size.m; i += R) {
    product_block<R, V>(size, {a.row(i), a.ld}, {b.data + j, b.ld}, {y.row(i) + j, y.ld});
  }
}

/// m, n and k are multiples of 16. Blocks of 16 sums hide the latency of two multiply-add units; 8
/// leave room where there are 16 registers.
inline void product(const cpu::Bf16Tiles*, const Extent& size, const Matrix<float>& a,
                    const Matrix<float>& b, const Matrix<float>& y) {
  constexpr std::int64_t kVector = kLanes<Floats>;
  constexpr int kWide = HWY_TARGET == HWY_AVX2 ? 2 : 4;
  std::int64_t j = 0;
  for (; j + kWide * kVector <= size.n; j += kWide * kVector) {
    product_columns<4, kWide>(size, a, b, y, j);
  }
  if constexpr (kWide * kVector > 16) {
    for (; j + 2 * kVector <= size.n; j += 2 * kVector) product_columns<8, 2>(size, a, b, y, j);
    for (; j < size.n; j += kVector) product_columns<16, 1>(size, a, b, y, j);
  }
}

inline void product(const cpu::Bf16Tiles* tiles, const Extent& size, const Matrix<BFloat16>& a,
                    const Matrix<std::uint32_t>& b, const Matrix<float>& y) {
  tiles->run({size.m, size.n, size.k, a.data, a.ld, b.data, b.ld, y.data, y.ld, size.accumulate});
}

// --- masks

/// Which keys of a tile each query of a vector sees: those before its limit.
class Visible {
 public:
  HWY_INLINE Visible(const AttentionJob& job, const Tile& tile, std::int64_t j) {
    const std::int64_t last = j + kLanes<Floats> - 1;
    const std::int64_t n = tile.keys;
    limit_ = Floats(static_cast<double>(n));
    all_ = any_ = n;
    if (job.options.causal) {
      const std::int64_t first_limit =
          std::clamp<std::int64_t>(tile.t + j + job.S - job.T + 1 - tile.s, -kTile, kTile);
      limit_ = Floats(hn::Min(limit_.raw, hn::Iota(TagF(), static_cast<float>(first_limit))));
      all_ = std::clamp<std::int64_t>(first_limit, 0, n);
      any_ = std::clamp<std::int64_t>(first_limit + last - j, 0, n);
    }
    all_ &= ~std::int64_t{1};
    any_ = round_up(any_, 2);
  }
  /// Every query sees the keys before it.
  HWY_INLINE std::int64_t all() const { return all_; }
  /// No query sees the keys from it on. Both are even.
  HWY_INLINE std::int64_t any() const { return any_; }
  HWY_INLINE Floats only(Floats x, std::int64_t key, Floats hidden) const {
    return select(Floats(hn::Set(TagF(), static_cast<float>(key))) < limit_, x, hidden);
  }

 private:
  Floats limit_;
  std::int64_t all_, any_;
};

/// Draws the words of a tile's weights, as dropout() does over [B, H, T, S].
inline void draw(const AttentionJob& job, const Tile& tile, KeepBits& keep) {
  constexpr std::int64_t kStep = kLanes<Floats>;
  HWY_ALIGN std::uint32_t words[kTile + 8 * kStep];
  const std::uint32_t threshold = kernels::math::dropout_threshold(job.options.dropout);
  for (std::int64_t i = 0; i < tile.queries; ++i) {
    const std::int64_t at = (tile.head * job.T + tile.t + i) * job.S + tile.s, skip = at % 4;
    for (std::int64_t k = 0; 4 * k < skip + tile.keys; k += kStep) {
      philox_vector(job.options.draw.seed, job.options.draw.offset,
                    static_cast<std::uint64_t>(at / 4 + k), words + 4 * k);
    }
    for (std::int64_t s = 0; s < tile.keys; s += 32) {
      std::uint32_t bits = 0;
      for (std::int64_t k = 0; k < 32; k += kStep) {
        const auto mask = kept(Whole<Floats>{}, Floats(), words + skip + s + k, threshold);
        std::uint8_t bytes[8] = {};
        hn::StoreMaskBits(TagF(), mask, bytes);
        bits |= static_cast<std::uint32_t>(bytes[0] | bytes[1] << 8) << k;
      }
      keep.of[s / 32][i] = bits;
    }
  }
}

HWY_INLINE Floats kept_only(const KeepBits& keep, std::int64_t key, std::int64_t j, Floats x) {
  const auto bits = hn::LoadU(TagU(), keep.of[key / 32] + j);
  const auto bit = hn::Set(TagU(), std::uint32_t{1} << (key % 32));
  return select(hn::RebindMask(TagF(), hn::TestBit(bits, bit)), x, Floats(0.0));
}

/// Calls f with a null T* and a null E*: the dtype, and what products are computed on.
template <class F>
void dispatch(const AttentionJob& job, const F& f) {
  float* const f32 = nullptr;
  BFloat16* const bf16 = nullptr;
  switch (job.q.dtype) {
    case DType::f32:
      return f(f32, f32);
    case DType::f16:
      return f(static_cast<Half*>(nullptr), f32);
    default:
      return job.bf16 != nullptr ? f(bf16, bf16) : f(bf16, f32);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();
#endif
