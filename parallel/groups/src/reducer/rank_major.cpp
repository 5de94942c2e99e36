#include "reducer/rank_major.h"

#include <numeric>
#include <utility>

#include "cairn/core/sharding.h"
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

}  // namespace

RankMajor::RankMajor(std::vector<std::int64_t> sizes, DType dtype, int world_size)
    : sizes_(std::move(sizes)),
      counts_(static_cast<std::size_t>(world_size)),
      alignment_(kAlignment / static_cast<std::int64_t>(core::size_of(dtype))),
      world_size_(world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    for (std::size_t i = 0; i < sizes_.size(); ++i)
      counts_[static_cast<std::size_t>(rank)] += padded(rank, i);
  }
}

std::int64_t RankMajor::elements() const {
  return std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
}

std::int64_t RankMajor::padded(int rank, std::size_t gradient) const {
  const std::int64_t size = core::even_part(sizes_[gradient], rank, world_size_).size();
  return (size + alignment_ - 1) / alignment_ * alignment_;
}

void RankMajor::fill(const std::vector<TensorView>& gradients, const TensorView& flat,
                     double scale) const {
  std::vector<TensorView> from, to;
  std::int64_t at = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      const core::ElementRange part = core::even_part(sizes_[i], rank, world_size_);
      const std::int64_t end = at + part.size(), next = at + padded(rank, i);
      const bool there = gradients[i].defined();
      if (there && part.size() > 0) {
        from.push_back(core::part_of(gradients[i], part));
        to.push_back(flat.slice(0, at, end));
      }
      const std::int64_t zeros = there ? end : at;
      if (zeros < next) kernels::fill(flat.slice(0, zeros, next), 0.0);
      at = next;
    }
  }
  copy_all(from, to, scale);
}

TensorView RankMajor::part(const TensorView& of_rank, int rank, std::size_t gradient) const {
  std::int64_t at = 0;
  for (std::size_t i = 0; i < gradient; ++i) at += padded(rank, i);
  return of_rank.slice(0, at, at + core::even_part(sizes_[gradient], rank, world_size_).size());
}

}  // namespace cairn::parallel
