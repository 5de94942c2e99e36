// One call of attention: what it works on, how it is cut, and the memory its threads share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cairn/core/parallel_for.h"
#include "cairn/kernels/attention.h"
#include "cpu/attention_scratch.h"
#include "cpu/bf16_tiles.h"
#include "temporary.h"

namespace cairn::kernels::cpu::attention {

inline std::int64_t divided(std::int64_t n, std::int64_t by) {
  return (n + by - 1) / by;
}

struct AttentionJob {
  TensorView q, k, v, y, lse, dy, dq, dk, dv;
  AttentionOptions options;
  const Bf16Tiles* bf16;  // what computes the products; null: f32
  std::int64_t T, S;
  std::int64_t heads, key_heads, sharing;  // of queries, of keys; queries' heads for one of keys
  std::int64_t width;                      // D, rounded up
  std::int64_t parts = 1;  // of a head: groups of its tiles of queries; backward: of keys' heads
  std::int64_t workers = 1;
  char* scratch = nullptr;  // of each worker
  std::size_t scratch_bytes = 0;
  // Backward: dq^T of the heads that share one of keys; for each worker, or each part where there
  // are some.
  float* sums = nullptr;
  std::int64_t sums_count = 0;  // floats of one head's

  AttentionJob(const TensorView& queries, const TensorView& keys, const TensorView& values,
               const AttentionOptions& attention)
      : q(queries),
        k(keys),
        v(values),
        options(attention),
        bf16(q.dtype == DType::bf16 ? bf16_tiles() : nullptr),
        T(q.size(2)),
        S(k.size(2)),
        heads(q.size(0) * q.size(1)),
        key_heads(q.size(0) * k.size(1)),
        sharing(q.size(1) / k.size(1)),
        width(round_up(q.size(3), bf16 ? Operand<core::BFloat16>::kUnit : Operand<float>::kUnit)) {}

  /// Of a tile of queries, of keys.
  std::int64_t queries(std::int64_t tile) const { return std::min(kTile, T - tile * kTile); }
  std::int64_t keys(std::int64_t tile) const { return std::min(kTile, S - tile * kTile); }
  /// A query of a head sees the keys before this one.
  std::int64_t visible(std::int64_t head, std::int64_t t) const {
    const std::int64_t n = length(head);
    return options.causal ? std::clamp<std::int64_t>(t + S - T + 1, 0, n) : n;
  }
  /// The same for the last query of a tile.
  std::int64_t visible_to_tile(std::int64_t head, std::int64_t tile) const {
    return visible(head, tile * kTile + queries(tile) - 1);
  }
  float* sums_of(std::int64_t holder) const { return sums + holder * sharing * sums_count; }
  void* scratch_of(std::int64_t worker) const {
    return scratch + static_cast<std::size_t>(worker) * scratch_bytes;
  }

 private:
  /// Keys of a head's sample.
  std::int64_t length(std::int64_t head) const {
    if (!options.key_lengths.defined()) return S;
    const std::int64_t* const lengths = options.key_lengths.as<std::int64_t>();
    return std::clamp<std::int64_t>(lengths[head / q.size(1)], 0, S);
  }
};

/// Scores of a head: those of queries [t, t + queries) with keys [s, s + keys).
struct Tile {
  std::int64_t head, t, queries, s, keys;
};

/// Calls add(Tile) for what is seen of a tile. One that the mask cuts is taken in halves of its
/// queries, so that less of what is computed is hidden.
template <class Add>
void for_visible(const AttentionJob& job, std::int64_t head, std::int64_t query_tile,
                 std::int64_t key_tile, const Add& add) {
  const std::int64_t s = key_tile * kTile, first = query_tile * kTile;
  const bool cut = job.visible(head, first) < s + job.keys(key_tile);
  const std::int64_t step = cut ? kTile / 2 : kTile, end = first + job.queries(query_tile);
  for (std::int64_t t = first; t < end; t += step) {
    const std::int64_t queries = std::min(step, end - t);
    const std::int64_t keys = std::min(kTile, job.visible(head, t + queries - 1) - s);
    if (keys > 0) add(Tile{head, t, queries, s, keys});
  }
}

/// Workers take pieces as they come: what a piece computes does not depend on whose it is.
class Pieces {
 public:
  explicit Pieces(std::int64_t count) : count_(count) {}
  /// The next one, or -1.
  std::int64_t take() {
    const std::int64_t piece = next_++;
    return piece < count_ ? piece : -1;
  }

 private:
  std::int64_t count_;
  std::atomic<std::int64_t> next_ = 0;
};

/// Queries of which the backward knows shift and delta at once: of the heads that share one of
/// keys, each head's in whole tiles.
inline std::int64_t rows_kept(const AttentionJob& job) {
  return job.sharing * tiles_of(job.T) * kTile;
}

using Worker = void (*)(const AttentionJob& job, std::int64_t worker, Pieces& pieces);

inline void run_workers(const AttentionJob& job, std::int64_t pieces, Worker worker) {
  Pieces left(pieces);
  core::parallel_for(job.workers, 1, [&](std::int64_t begin, std::int64_t end) {
    if (job.bf16 != nullptr) job.bf16->begin();
    for (std::int64_t i = begin; i < end; ++i) worker(job, i, left);
    if (job.bf16 != nullptr) job.bf16->end();
  });
}

/// Of all workers.
inline Temporary bytes_for_workers(const AttentionJob& job, Device device) {
  const auto bytes = static_cast<std::int64_t>(job.scratch_bytes);
  return temporary({job.workers * bytes}, DType::u8, device);
}

}  // namespace cairn::kernels::cpu::attention
