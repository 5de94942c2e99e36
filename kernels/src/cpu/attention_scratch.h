// The memory that a thread of attention works in: tiles of 64 queries by 64 keys and what belongs
// to them. It stays in the second-level cache for heads of up to 128 elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cairn/core/half.h"

namespace cairn::kernels::cpu::attention {

inline constexpr std::int64_t kTile = 64;  // queries, keys

inline std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}
inline std::int64_t tiles_of(std::int64_t n) {
  return (n + kTile - 1) / kTile;
}
/// Tiles that share what is made of a tile of the other side: more where heads are small.
inline std::int64_t group_of(std::int64_t width) {
  return std::clamp<std::int64_t>(512 / width, 1, 4);
}

/// What products are computed on: f32, or bf16. A right-hand matrix consists of words, which for
/// bf16 are pairs of elements that lie below each other.
template <class E>
struct Operand {
  static constexpr bool kPaired = sizeof(E) == 2;
  using Word = std::conditional_t<kPaired, std::uint32_t, float>;
  static constexpr std::int64_t kPerWord = kPaired ? 2 : 1;
  static constexpr std::int64_t kUnit = kPaired ? 32 : 16;  // sides are multiples of it
};

template <class E>
struct Matrix {
  E* data = nullptr;
  std::int64_t ld = 0;

  E* row(std::int64_t i) const { return data + i * ld; }
  Matrix from(std::int64_t column) const { return {data + column, ld}; }
  Matrix below(std::int64_t first_row) const { return {row(first_row), ld}; }
};

/// Elements between rows, for rows of an odd number of cache lines: a column then spreads over all
/// sets of a cache.
template <class E>
std::int64_t leading_dimension(std::int64_t columns) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(E));
  return (round_up(columns * kSize, 128) + 64) / kSize;
}

/// Hands out pieces of a block of memory; without one it only counts.
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class E>
  E* take(std::int64_t count) {
    char* const at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(E)), 64));
    return reinterpret_cast<E*>(at);
  }
  template <class E>
  Matrix<E> matrix(std::int64_t rows, std::int64_t columns) {
    const std::int64_t ld = leading_dimension<E>(columns);
    return {take<E>(rows * ld), ld};
  }
  std::size_t used() const { return used_; }

 private:
  char* memory_;
  std::size_t used_ = 0;
};

/// [kTile, width] as elements and, for products that sum over the rows, as a right-hand matrix; the
/// same memory for f32.
template <class E>
struct Rows {
  Matrix<E> elements;
  Matrix<typename Operand<E>::Word> words;

  Rows(Carver& carver, std::int64_t width) : elements(carver.matrix<E>(kTile, width)) {
    if constexpr (Operand<E>::kPaired) {
      words = carver.matrix<std::uint32_t>(kTile / 2, width);
    } else {
      words = elements;
    }
  }
};

/// Memory of a transpose [width, kTile] that is a left-hand matrix.
template <class E>
auto left_transpose(Carver& carver, std::int64_t width) {
  return carver.matrix<typename Operand<E>::Word>(width, kTile / Operand<E>::kPerWord);
}
/// The same of a right-hand one.
template <class E>
auto right_transpose(Carver& carver, std::int64_t width) {
  return carver.matrix<typename Operand<E>::Word>(width / Operand<E>::kPerWord, kTile);
}

/// One bit for each weight of a tile: bit s % 32 of of[s / 32][t].
struct KeepBits {
  std::uint32_t of[kTile / 32][kTile];
};

template <class E>
struct ForwardScratch {
  using Word = typename Operand<E>::Word;
  struct Queries {
    Matrix<Word> transposed;
    Matrix<float> y;  // transposed, not yet divided by the sums
    float* top;       // score, as a power of two
    float* sum;
  };
  std::vector<Queries> queries;
  Matrix<E> k;
  Rows<E> v;
  Matrix<Word> v_transposed;
  Matrix<float> scores;  // [keys, queries]
  Matrix<Word> weights;  // the same memory for f32
  Matrix<float> rows;    // [queries, width]
  KeepBits* keep;

  ForwardScratch(Carver& carver, std::int64_t width)
      : k(carver.matrix<E>(kTile, width)),
        v(carver, width),
        v_transposed(left_transpose<E>(carver, width)),
        scores(carver.matrix<float>(kTile, kTile)),
        rows(carver.matrix<float>(kTile, width)),
        keep(carver.take<KeepBits>(1)) {
    for (std::int64_t i = 0; i < group_of(width); ++i) {
      queries.push_back({right_transpose<E>(carver, width), carver.matrix<float>(width, kTile),
                         carver.take<float>(kTile), carver.take<float>(kTile)});
    }
    if constexpr (Operand<E>::kPaired) {
      weights = right_transpose<E>(carver, kTile);
    } else {
      weights = scores;
    }
  }
  static std::size_t bytes(std::int64_t width) {
    Carver carver(nullptr);
    ForwardScratch(carver, width);
    return carver.used();
  }
};

template <class E>
struct BackwardScratch {
  using Word = typename Operand<E>::Word;
  struct Keys {
    Rows<E> k;
    Matrix<E> v;
    Matrix<Word> k_transposed;
    Matrix<float> dk, dv;
  };
  std::vector<Keys> keys;
  Rows<E> q, dy;
  Matrix<Word> q_transposed, dy_transposed;
  Matrix<float> scores, gradient;  // [keys, queries]; of f32, then the two below
  Matrix<E> weights, dscores;
  Matrix<Word> dscores_words;
  Matrix<float> rows;  // [queries, width]
  KeepBits* keep;
  float *shift, *delta;  // [heads, T]: lse, as a power of two; sum of dy y

  BackwardScratch(Carver& carver, std::int64_t width, std::int64_t rows_kept)
      : q(carver, width),
        dy(carver, width),
        q_transposed(right_transpose<E>(carver, width)),
        dy_transposed(right_transpose<E>(carver, width)),
        scores(carver.matrix<float>(kTile, kTile)),
        gradient(carver.matrix<float>(kTile, kTile)),
        rows(carver.matrix<float>(kTile, width)),
        keep(carver.take<KeepBits>(1)),
        shift(carver.take<float>(rows_kept)),
        delta(carver.take<float>(rows_kept)) {
    for (std::int64_t i = 0; i < group_of(width); ++i) {
      keys.push_back({Rows<E>(carver, width), carver.matrix<E>(kTile, width),
                      left_transpose<E>(carver, width), carver.matrix<float>(kTile, width),
                      carver.matrix<float>(kTile, width)});
    }
    if constexpr (Operand<E>::kPaired) {
      weights = carver.matrix<E>(kTile, kTile);
      dscores = carver.matrix<E>(kTile, kTile);
      dscores_words = right_transpose<E>(carver, kTile);
    } else {
      weights = scores;
      dscores = dscores_words = gradient;
    }
  }
  static std::size_t bytes(std::int64_t width, std::int64_t rows_kept) {
    Carver carver(nullptr);
    BackwardScratch(carver, width, rows_kept);
    return carver.used();
  }
};

/// Sums of dq^T: a matrix [width, kTile] for each tile of queries.
inline Matrix<float> query_sums(float* sums, std::int64_t width, std::int64_t tile) {
  const std::int64_t ld = leading_dimension<float>(kTile);
  return {sums + tile * width * ld, ld};
}
inline std::int64_t query_sums_count(std::int64_t width, std::int64_t T) {
  return tiles_of(T) * width * leading_dimension<float>(kTile);
}

}  // namespace cairn::kernels::cpu::attention
