// Gradients that ranks divide among each other, in the order in which a reduce_scatter takes them.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/core/tensor_view.h"

namespace cairn::parallel {

/// A flat buffer of several gradients: rank 0's piece, then rank 1's and so on.
///
/// Each gradient has a part for each of `shards` ranks (core::even_part); the parts of one of them
/// follow each other, each from a multiple of 64 bytes on, with zeros between. Where there are
/// `replicas` of such ranks, the parts of shard s are cut into a piece for each: rank
/// r * shards + s has piece r. Of one replica a piece is all of the parts.
class RankMajor {
 public:
  /// sizes: elements of each gradient.
  RankMajor(std::vector<std::int64_t> sizes, DType dtype, int shards, int replicas = 1);

  std::vector<std::int64_t> counts() const;              // elements of each rank's piece
  std::vector<std::int64_t> pieces_of(int shard) const;  // the same, of its replicas
  std::int64_t elements() const;                         // of all
  std::int64_t elements_of(int shard) const { return elements_[static_cast<std::size_t>(shard)]; }
  /// Where the rank's piece lies in the parts of its shard, [elements_of(shard)].
  core::ElementRange piece(int rank) const;
  /// Where the gradient's part lies there.
  TensorView part(const TensorView& parts, int shard, std::size_t gradient) const;

  /// flat [elements()] = scale * gradients, which are dense and may be of another floating dtype;
  /// an undefined one is zeros.
  void fill(const std::vector<TensorView>& gradients, const TensorView& flat, double scale) const;

 private:
  std::int64_t padded(int shard, std::size_t gradient) const;

  std::vector<std::int64_t> sizes_, elements_;  // by gradient, by shard
  std::int64_t alignment_;                      // elements
  int shards_, replicas_;
};

}  // namespace cairn::parallel
