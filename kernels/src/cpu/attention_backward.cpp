// The backward of attention.cpp: each tile's weights are computed anew from lse.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_backward.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>

#include "attention_composed.h"
#include "cpu/attention_job.h"
#include "cpu/attention_tiles.h"
#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "temporary.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

using cpu::attention::BackwardScratch;

template <class T, class E>
class Backward {
 public:
  Backward(const AttentionJob& job, cpu::attention::Carver carver)
      : job_(job), scratch_(carver, job.width, rows_kept(job)), drops_(job.options.dropout > 0) {}

  /// dk and dv of every parts-th group of neighbouring tiles of keys of a head; what these keys
  /// give to dq^T of the heads that share them is summed into `sums`.
  void run(std::int64_t piece, float* sums) {
    key_head_ = piece / job_.parts;
    std::fill(sums, sums + job_.sharing * job_.sums_count, 0.0f);
    for (std::int64_t i = 0; i < job_.sharing; ++i) {
      turn_to(i, sums);
      prepare_queries();
    }
    const std::int64_t tiles = tiles_of(job_.S), group = group_of(job_.width);
    for (std::int64_t i = piece % job_.parts * group; i < tiles; i += job_.parts * group) {
      run_group(i, std::min(tiles, i + group), sums);
    }
  }

  /// dq of a head from the sums of its parts, of which the first are given.
  void finish_queries(std::int64_t head, float* sums) {
    for (std::int64_t part = 1; part < job_.parts; ++part) {
      const float* const more = sums + part * job_.sharing * job_.sums_count;
      for_vectors<Floats>(job_.sums_count, [&](auto io, std::int64_t i) HWY_ATTR {
        io.store(io.load(sums + i) + io.load(more + i), sums + i);
      });
    }
    sums_ = sums;
    for (std::int64_t tile = 0; tile < tiles_of(job_.T); ++tile) {
      const std::int64_t n = job_.queries(tile);
      transpose(dq_transposed(tile), job_.width, round_up(n, 16), scratch_.rows);
      store_rows(scratch_.rows, job_.options.scale, head_of<T>(job_.dq, head), tile * kTile, n);
    }
  }

 private:
  using Keys = typename BackwardScratch<E>::Keys;
  static constexpr std::int64_t kUnit = Operand<E>::kUnit, kPerWord = Operand<E>::kPerWord;

  Matrix<float> dq_transposed(std::int64_t tile) const {
    return cpu::attention::query_sums(sums_, job_.width, tile);
  }

  /// To the nth of the heads that share the piece's keys.
  void turn_to(std::int64_t n, float* sums) {
    const std::int64_t rows = n * tiles_of(job_.T) * kTile;
    head_ = key_head_ * job_.sharing + n;
    sums_ = sums + n * job_.sums_count;
    shift_ = scratch_.shift + rows;
    delta_ = scratch_.delta + rows;
  }

  /// Of every query: the shift of its scores, and sum dy y, which the softmax's backward subtracts.
  void prepare_queries() {
    const float* const lse = job_.lse.as<float>() + head_ * job_.T;
    const std::int64_t tiles = tiles_of(job_.T);
    std::fill(shift_, shift_ + tiles * kTile, 0.0f);
    std::fill(delta_, delta_ + tiles * kTile, 0.0f);
    for (std::int64_t t = 0; t < job_.T; ++t) {
      if (!std::isinf(lse[t])) shift_[t] = static_cast<float>(kLog2E * lse[t]);
    }
    const Matrix<E>&y = scratch_.q.elements, &dy = scratch_.dy.elements;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t n = job_.queries(tile);
      load_rows(head_of<T>(job_.y, head_), tile * kTile, n, y);
      load_rows(head_of<T>(job_.dy, head_), tile * kTile, n, dy);
      for (std::int64_t i = 0; i < n; ++i) {
        delta_[tile * kTile + i] = dot(y.row(i), dy.row(i));
      }
    }
  }
  float dot(const E* x, const E* y) const {
    Floats sum;
    for (std::int64_t d = 0; d < job_.width; d += kLanes<Floats>) {
      sum = fma(load<Floats>(x + d), load<Floats>(y + d), sum);
    }
    return sum_of(sum);
  }

  void run_group(std::int64_t first, std::int64_t last, float* sums) {
    for (std::int64_t key = first; key < last; ++key) load_keys(key, scratch_.keys[key - first]);
    for (std::int64_t i = 0; i < job_.sharing; ++i) {
      turn_to(i, sums);
      add_queries(first, last);
    }
    for (std::int64_t key = first; key < last; ++key) {
      const Keys& from = scratch_.keys[key - first];
      const std::int64_t s = key * kTile, n = job_.keys(key);
      store_rows(from.dk, job_.options.scale, head_of<T>(job_.dk, key_head_), s, n);
      store_rows(from.dv, 1.0 / (1.0 - job_.options.dropout), head_of<T>(job_.dv, key_head_), s, n);
    }
  }

  /// What the head's queries give to these tiles of keys, and get from them.
  void add_queries(std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = 0; tile < tiles_of(job_.T); ++tile) {
      if (job_.visible_to_tile(head_, tile) <= first * kTile) continue;
      load_queries(tile);
      for (std::int64_t key = first; key < last; ++key) {
        for_visible(job_, head_, tile, key,
                    [&](const Tile& part) HWY_ATTR { add(part, scratch_.keys[key - first]); });
      }
    }
  }

  void load_keys(std::int64_t tile, const Keys& to) {
    const std::int64_t n = job_.keys(tile), padded = round_up(n, kUnit);
    load_rows(head_of<T>(job_.v, key_head_), tile * kTile, n, to.v);
    load_rows(head_of<T>(job_.k, key_head_), tile * kTile, n, to.k.elements);
    pair_rows(to.k.elements, padded, job_.width, to.k.words);
    transpose(to.k.words, padded / kPerWord, job_.width, to.k_transposed);
    std::fill(to.dk.data, to.dk.row(kTile), 0.0f);
    std::fill(to.dv.data, to.dv.row(kTile), 0.0f);
  }

  void load_queries(std::int64_t tile) {
    lay_out(head_of<T>(job_.q, head_), tile, scratch_.q, scratch_.q_transposed);
    lay_out(head_of<T>(job_.dy, head_), tile, scratch_.dy, scratch_.dy_transposed);
  }
  void lay_out(const HeadRows<T>& head, std::int64_t tile, const cpu::attention::Rows<E>& rows,
               const Matrix<typename Operand<E>::Word>& transposed) {
    const std::int64_t n = job_.queries(tile), padded = round_up(n, kUnit);
    load_rows(head, tile * kTile, n, rows.elements);
    pair_rows(rows.elements, padded, job_.width, rows.words);
    transpose(as_words(rows.elements), padded, job_.width / kPerWord, transposed);
  }

  void add(const Tile& tile, const Keys& to) {
    const std::int64_t m = round_up(tile.keys, kUnit), n = round_up(tile.queries, kUnit);
    const std::int64_t width = job_.width, column = tile.t % kTile, row = column / kPerWord;
    const auto q = scratch_.q.words.below(row), dy = scratch_.dy.words.below(row);
    product(job_.bf16, {m, n, width, false}, to.k.elements, scratch_.q_transposed.from(column),
            scratch_.scores);
    product(job_.bf16, {m, n, width, false}, to.v, scratch_.dy_transposed.from(column),
            scratch_.gradient);
    if (drops_) draw(job_, tile, *scratch_.keep);
    for (std::int64_t j = 0; j < n; j += kLanes<Floats>) differentiate(tile, m, j);
    product(job_.bf16, {m, width, n, true}, scratch_.weights, dy, to.dv);
    product(job_.bf16, {m, width, n, true}, scratch_.dscores, q, to.dk);
    product(job_.bf16, {width, n, m, true}, as_elements<E>(to.k_transposed), scratch_.dscores_words,
            dq_transposed(tile.t / kTile).from(column));
  }

  /// From scores and the gradient of the weights: the weights and the gradient of the scores, of a
  /// vector of queries.
  void differentiate(const Tile& tile, std::int64_t m, std::int64_t j) {
    const Visible visible(job_, tile, j);
    const Floats scale(job_.options.scale * kLog2E), none(0.0);
    const Floats shift = load<Floats>(shift_ + tile.t + j);
    const Floats delta = load<Floats>(delta_ + tile.t + j);
    const auto weight = [&](std::int64_t k) HWY_ATTR {
      return power_of_two(fma(scale, from(scratch_.scores, k, j), -shift));
    };
    std::int64_t k = 0;
    for (; k < visible.all(); k += 2) finish(weight(k), weight(k + 1), delta, k, j);
    for (; k < visible.any(); k += 2) {
      finish(visible.only(weight(k), k, none), visible.only(weight(k + 1), k + 1, none), delta, k,
             j);
    }
    for (; k < m; k += 2) {
      keep(none, none, scratch_.weights, k, j);
      keep(none, none, scratch_.dscores, k, j);
      store_words(none, none, scratch_.dscores_words, k, j);
    }
  }

  static HWY_INLINE Floats from(const Matrix<float>& x, std::int64_t k, std::int64_t j) {
    return load<Floats>(x.row(k) + j);
  }
  static HWY_INLINE void keep(Floats even, Floats odd, const Matrix<E>& y, std::int64_t k,
                              std::int64_t j) {
    store_element(even, y.row(k) + j);
    store_element(odd, y.row(k + 1) + j);
  }
  HWY_INLINE void finish(Floats even, Floats odd, Floats delta, std::int64_t k,
                         std::int64_t j) const {
    Floats even_gradient = from(scratch_.gradient, k, j);
    Floats odd_gradient = from(scratch_.gradient, k + 1, j);
    Floats even_weight = even, odd_weight = odd;
    if (drops_) {
      const Floats factor(1.0 / (1.0 - job_.options.dropout));
      even_gradient = kept_only(*scratch_.keep, k, j, factor * even_gradient);
      odd_gradient = kept_only(*scratch_.keep, k + 1, j, factor * odd_gradient);
      even_weight = kept_only(*scratch_.keep, k, j, even);
      odd_weight = kept_only(*scratch_.keep, k + 1, j, odd);
    }
    keep(even_weight, odd_weight, scratch_.weights, k, j);
    const Floats even_score = even * (even_gradient - delta);
    const Floats odd_score = odd * (odd_gradient - delta);
    store_words(even_score, odd_score, scratch_.dscores_words, k, j);
    if constexpr (kPerWord > 1) keep(even_score, odd_score, scratch_.dscores, k, j);
  }

  const AttentionJob& job_;
  BackwardScratch<E> scratch_;
  bool drops_;
  std::int64_t key_head_ = 0, head_ = 0;
  float *sums_ = nullptr, *shift_ = nullptr, *delta_ = nullptr;  // of the head
};

template <class F>
void with_backward(const AttentionJob& job, std::int64_t worker, const F& f) {
  dispatch(job, [&](auto* t, auto* e) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(t)>;
    using E = std::remove_pointer_t<decltype(e)>;
    f(Backward<T, E>(job, cpu::attention::Carver(job.scratch_of(worker))));
  });
}

void AttentionBackwardWorker(const AttentionJob& job, std::int64_t worker, Pieces& pieces) {
  with_backward(job, worker, [&](auto&& backward) HWY_ATTR {
    for (std::int64_t i = pieces.take(); i >= 0; i = pieces.take()) {
      float* const sums = job.sums_of(job.parts > 1 ? i : worker);
      backward.run(i, sums);
      for (std::int64_t n = 0; job.parts == 1 && n < job.sharing; ++n)
        backward.finish_queries(i * job.sharing + n, sums + n * job.sums_count);
    }
  });
}

/// dq of the heads whose keys were shared.
void AttentionQueriesWorker(const AttentionJob& job, std::int64_t worker, Pieces& pieces) {
  with_backward(job, worker, [&](auto&& backward) HWY_ATTR {
    for (std::int64_t i = pieces.take(); i >= 0; i = pieces.take()) {
      float* const sums = job.sums_of(i / job.sharing * job.parts);
      backward.finish_queries(i, sums + i % job.sharing * job.sums_count);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(AttentionBackwardWorker);
HWY_EXPORT(AttentionQueriesWorker);

void CpuBackend::attention_backward(View q, View k, View v, View y, View lse, View dy, View dq,
                                    View dk, View dv, const AttentionOptions& options) const {
  using namespace cpu::attention;
  if (q.dtype == DType::f64) {
    return composed_attention_backward(*this, q, k, v, dy, dq, dk, dv, options);
  }
  AttentionJob job(q, k, v, options);
  job.y = y, job.lse = lse, job.dy = dy, job.dq = dq, job.dk = dk, job.dv = dv;
  const std::int64_t threads = core::num_threads();
  const std::int64_t groups = divided(tiles_of(job.S), group_of(job.width));
  job.parts = std::clamp<std::int64_t>(divided(threads, job.key_heads), 1, groups);
  const std::int64_t pieces = job.key_heads * job.parts;
  job.workers = std::min(threads, pieces);
  job.scratch_bytes = job.bf16 != nullptr
                          ? BackwardScratch<core::BFloat16>::bytes(job.width, rows_kept(job))
                          : BackwardScratch<float>::bytes(job.width, rows_kept(job));
  const Temporary scratch = bytes_for_workers(job, q.device);
  job.scratch = scratch.view.as<char>();
  job.sums_count = query_sums_count(job.width, job.T);
  const std::int64_t sums_held = job.parts > 1 ? pieces : job.workers;
  const Temporary sums =
      temporary({sums_held * job.sharing * job.sums_count}, DType::f32, q.device);
  job.sums = sums.view.as<float>();
  run_workers(job, pieces, HWY_DYNAMIC_DISPATCH(AttentionBackwardWorker));
  if (job.parts > 1) {
    run_workers(job, job.heads, HWY_DYNAMIC_DISPATCH(AttentionQueriesWorker));
  }
}

}  // namespace cairn::kernels
#endif
