#include "reducer/rank_major.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::parallel {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes

/// In one launch, where the dtypes allow it.
void copy_all(const std::vector<TensorView>& from, const std::vector<TensorView>& to,
              double scale) {
  if (from.empty()) return;
  if (from[0].dtype != DType::f64) {
    (void)kernels::multi_tensor_scale(from, to, scale);
    return;
  }
  for (std::size_t i = 0; i < from.size(); ++i) kernels::affine(from[i], scale, 0.0, to[i]);
}

/// What of x is in y too.
core::ElementRange within(core::ElementRange x, core::ElementRange y) {
  const std::int64_t begin = std::max(x.begin, y.begin);
  return {begin, std::max(begin, std::min(x.end, y.end))};
}

}  // namespace

RankMajor::RankMajor(std::vector<std::int64_t> sizes, DType dtype, int shards, int replicas)
    : sizes_(std::move(sizes)),
      elements_(static_cast<std::size_t>(shards)),
      alignment_(kAlignment / static_cast<std::int64_t>(core::size_of(dtype))),
      shards_(shards),
      replicas_(replicas) {
  for (int shard = 0; shard < shards; ++shard) {
    for (std::size_t i = 0; i < sizes_.size(); ++i)
      elements_[static_cast<std::size_t>(shard)] += padded(shard, i);
  }
}

std::int64_t RankMajor::elements() const {
  return std::accumulate(elements_.begin(), elements_.end(), std::int64_t{0});
}

core::ElementRange RankMajor::piece(int rank) const {
  return core::even_part(elements_of(rank % shards_), rank / shards_, replicas_);
}

std::vector<std::int64_t> RankMajor::counts() const {
  std::vector<std::int64_t> counts;
  counts.reserve(static_cast<std::size_t>(shards_) * static_cast<std::size_t>(replicas_));
  for (int rank = 0; rank < shards_ * replicas_; ++rank) counts.push_back(piece(rank).size());
  return counts;
}

std::vector<std::int64_t> RankMajor::pieces_of(int shard) const {
  std::vector<std::int64_t> counts;
  counts.reserve(static_cast<std::size_t>(replicas_));
  for (int r = 0; r < replicas_; ++r) counts.push_back(piece(r * shards_ + shard).size());
  return counts;
}

std::int64_t RankMajor::padded(int shard, std::size_t gradient) const {
  const std::int64_t size = core::even_part(sizes_[gradient], shard, shards_).size();
  return (size + alignment_ - 1) / alignment_ * alignment_;
}

TensorView RankMajor::part(const TensorView& parts, int shard, std::size_t gradient) const {
  std::int64_t at = 0;
  for (std::size_t i = 0; i < gradient; ++i) at += padded(shard, i);
  return parts.slice(0, at, at + core::even_part(sizes_[gradient], shard, shards_).size());
}

void RankMajor::fill(const std::vector<TensorView>& gradients, const TensorView& flat,
                     double scale) const {
  std::vector<TensorView> from, to;
  std::int64_t start = 0;  // of the rank's piece in flat
  for (int rank = 0; rank < shards_ * replicas_; ++rank) {
    const core::ElementRange own = piece(rank);
    const auto in_flat = [&](core::ElementRange x) {
      return flat.slice(0, start + x.begin - own.begin, start + x.end - own.begin);
    };
    std::int64_t at = 0;  // of the gradient in the parts of the shard
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      const core::ElementRange part = core::even_part(sizes_[i], rank % shards_, shards_);
      const std::int64_t end = gradients[i].defined() ? at + part.size() : at;
      const std::int64_t next = at + padded(rank % shards_, i);
      const core::ElementRange values = within({at, end}, own), zeros = within({end, next}, own);
      if (values.size() > 0) {
        const std::int64_t moved = part.begin - at;
        from.push_back(core::part_of(gradients[i], {values.begin + moved, values.end + moved}));
        to.push_back(in_flat(values));
      }
      if (zeros.size() > 0) kernels::fill(in_flat(zeros), 0.0);
      at = next;
    }
    start += own.size();
  }
  copy_all(from, to, scale);
}

}  // namespace cairn::parallel
