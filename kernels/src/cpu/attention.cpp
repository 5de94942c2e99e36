// Attention in tiles of 64 queries by 64 keys, whose scores never leave the first-level cache.
//
// Scores are kept transposed, [keys, queries]: a vector holds as many queries, each with its own
// maximum, sum and shift, so that nothing is summed across lanes, and each product finds its
// operands as they lie. Heads, and the queries (backward: the keys) of a head, are shared among
// threads; what one of them sums is its own, in an order that does not depend on how many there
// are.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_composed.h"
#include "cpu/attention_job.h"
#include "cpu/attention_tiles.h"
#include "cpu/cpu_backend.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

using cpu::attention::ForwardScratch;

constexpr float kLowest = -3e38f;  // below every score; its differences are finite

template <class T, class E>
class Forward {
 public:
  Forward(const AttentionJob& job, cpu::attention::Carver carver)
      : job_(job), scratch_(carver, job.width), drops_(job.options.dropout > 0) {}

  /// A group of neighbouring tiles of queries of a head. Under a causal mask the last ones see most
  /// and come first.
  void run(std::int64_t piece) {
    head_ = piece % job_.heads;
    const std::int64_t tiles = tiles_of(job_.T), group = job_.parts - 1 - piece / job_.heads;
    const std::int64_t first = tiles * group / job_.parts, last = tiles * (group + 1) / job_.parts;
    for (std::int64_t i = first; i < last; ++i) begin(i, scratch_.queries[i - first]);
    const std::int64_t seen = tiles_of(job_.visible_to_tile(head_, last - 1));
    for (std::int64_t key = 0; key < seen; ++key) {
      load_keys(key);
      for (std::int64_t i = first; i < last; ++i) {
        for_visible(job_, head_, i, key,
                    [&](const Tile& tile) HWY_ATTR { add(tile, scratch_.queries[i - first]); });
      }
    }
    for (std::int64_t i = first; i < last; ++i) finish(i, scratch_.queries[i - first]);
  }

 private:
  using Queries = typename ForwardScratch<E>::Queries;
  static constexpr std::int64_t kUnit = Operand<E>::kUnit, kPerWord = Operand<E>::kPerWord;

  void begin(std::int64_t tile, const Queries& to) {
    const std::int64_t n = job_.queries(tile);
    load_rows(head_of<T>(job_.q, head_), tile * kTile, n, scratch_.k);
    transpose(as_words(scratch_.k), round_up(n, kUnit), job_.width / kPerWord, to.transposed);
    std::fill(to.top, to.top + kTile, kLowest);
    std::fill(to.sum, to.sum + kTile, 0.0f);
    std::fill(to.y.data, to.y.row(job_.width), 0.0f);
  }

  void load_keys(std::int64_t tile) {
    const std::int64_t n = job_.keys(tile), padded = round_up(n, kUnit);
    const std::int64_t head = head_ / job_.sharing;
    load_rows(head_of<T>(job_.k, head), tile * kTile, n, scratch_.k);
    load_rows(head_of<T>(job_.v, head), tile * kTile, n, scratch_.v.elements);
    pair_rows(scratch_.v.elements, padded, job_.width, scratch_.v.words);
    transpose(scratch_.v.words, padded / kPerWord, job_.width, scratch_.v_transposed);
  }

  void add(const Tile& tile, const Queries& to) {
    const std::int64_t m = round_up(tile.keys, kUnit), n = round_up(tile.queries, kUnit);
    const std::int64_t column = tile.t % kTile;
    product(job_.bf16, {m, n, job_.width, false}, scratch_.k, to.transposed.from(column),
            scratch_.scores);
    if (drops_) draw(job_, tile, *scratch_.keep);
    for (std::int64_t j = 0; j < n; j += kLanes<Floats>) weigh(tile, m, j, column, to);
    product(job_.bf16, {job_.width, n, m, true}, as_elements<E>(scratch_.v_transposed),
            scratch_.weights, to.y.from(column));
  }

  /// Weights of a vector of queries, relative to the largest score yet. They are column + j and
  /// following of their tile.
  void weigh(const Tile& tile, std::int64_t m, std::int64_t j, std::int64_t column,
             const Queries& to) {
    const Visible visible(job_, tile, j);
    const Floats scale(job_.options.scale * kLog2E), lowest(static_cast<double>(kLowest));
    const Floats none(0.0), before = load<Floats>(to.top + column + j);
    Floats top[2] = {before, before};
    std::int64_t k = 0;
    for (; k < visible.all(); k += 2) {
      top[0] = larger(scale * score(k, j), top[0]);
      top[1] = larger(scale * score(k + 1, j), top[1]);
    }
    for (; k < visible.any(); ++k) {
      top[0] = larger(visible.only(scale * score(k, j), k, lowest), top[0]);
    }
    const Floats now = larger(top[0], top[1]), shrink = power_of_two(before - now);
    const auto weight = [&](std::int64_t key)
                            HWY_ATTR { return power_of_two(fma(scale, score(key, j), -now)); };
    Floats sum[2];
    for (k = 0; k < visible.all(); k += 2) {
      const Floats even = weight(k), odd = weight(k + 1);
      sum[0] = sum[0] + even, sum[1] = sum[1] + odd;
      keep(even, odd, k, j);
    }
    for (; k < visible.any(); k += 2) {
      const Floats even = visible.only(weight(k), k, none);
      const Floats odd = visible.only(weight(k + 1), k + 1, none);
      sum[0] = sum[0] + even, sum[1] = sum[1] + odd;
      keep(even, odd, k, j);
    }
    for (; k < m; k += 2) store_words(none, none, scratch_.weights, k, j);
    store(now, to.top + column + j);
    store(fma(shrink, load<Floats>(to.sum + column + j), sum[0] + sum[1]), to.sum + column + j);
    if (!hn::AllTrue(TagF(), shrink == Floats(1.0))) rescale(to.y, column + j, shrink);
  }

  HWY_INLINE Floats score(std::int64_t k, std::int64_t j) const {
    return load<Floats>(scratch_.scores.row(k) + j);
  }
  HWY_INLINE void keep(Floats even, Floats odd, std::int64_t k, std::int64_t j) const {
    if (drops_) {
      even = kept_only(*scratch_.keep, k, j, even);
      odd = kept_only(*scratch_.keep, k + 1, j, odd);
    }
    store_words(even, odd, scratch_.weights, k, j);
  }
  void rescale(const Matrix<float>& y, std::int64_t j, Floats factor) const {
    for (std::int64_t d = 0; d < job_.width; ++d) {
      store(factor * load<Floats>(y.row(d) + j), y.row(d) + j);
    }
  }

  void finish(std::int64_t tile, const Queries& from) {
    const std::int64_t n = job_.queries(tile);
    float* const lse = job_.lse.as<float>() + head_ * job_.T + tile * kTile;
    for (std::int64_t i = 0; i < n; ++i) {
      lse[i] = from.sum[i] == 0.0f ? -std::numeric_limits<float>::infinity()
                                   : static_cast<float>(kLn2 * from.top[i] + std::log(from.sum[i]));
    }
    for (std::int64_t j = 0; j < n; j += kLanes<Floats>) {
      const Floats sum = load<Floats>(from.sum + j);
      rescale(from.y, j, select(sum == Floats(0.0), sum, Floats(1.0) / sum));
    }
    transpose(from.y, job_.width, round_up(n, 16), scratch_.rows);
    store_rows(scratch_.rows, 1.0 / (1.0 - job_.options.dropout), head_of<T>(job_.y, head_),
               tile * kTile, n);
  }

  const AttentionJob& job_;
  ForwardScratch<E> scratch_;
  bool drops_;
  std::int64_t head_ = 0;
};

void AttentionWorker(const AttentionJob& job, std::int64_t worker, Pieces& pieces) {
  dispatch(job, [&](auto* t, auto* e) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(t)>;
    using E = std::remove_pointer_t<decltype(e)>;
    Forward<T, E> forward(job, cpu::attention::Carver(job.scratch_of(worker)));
    for (std::int64_t i = pieces.take(); i >= 0; i = pieces.take()) forward.run(i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(AttentionWorker);

void CpuBackend::attention(View q, View k, View v, View y, View lse,
                           const AttentionOptions& options) const {
  using namespace cpu::attention;
  if (q.dtype == DType::f64) return composed_attention(*this, q, k, v, y, lse, options);
  AttentionJob job(q, k, v, options);
  job.y = y, job.lse = lse;
  const std::int64_t tiles = tiles_of(job.T), threads = core::num_threads();
  job.parts =
      std::clamp(divided(2 * threads, job.heads), divided(tiles, group_of(job.width)), tiles);
  const std::int64_t pieces = job.heads * job.parts;
  job.workers = std::min(threads, pieces);
  job.scratch_bytes = job.bf16 != nullptr ? ForwardScratch<core::BFloat16>::bytes(job.width)
                                          : ForwardScratch<float>::bytes(job.width);
  const Temporary scratch = bytes_for_workers(job, q.device);
  job.scratch = scratch.view.as<char>();
  run_workers(job, pieces, HWY_DYNAMIC_DISPATCH(AttentionWorker));
}

}  // namespace cairn::kernels
#endif
