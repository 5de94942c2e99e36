// Gradients that ranks divide among each other, in the order in which a reduce_scatter takes them.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::parallel {

/// A flat buffer of several gradients: rank 0's part (core::even_part) of each of them, then rank
/// 1's and so on. Each part begins at a multiple of 64 bytes; what lies between is zeros.
class RankMajor {
 public:
  /// sizes: elements of each gradient.
  RankMajor(std::vector<std::int64_t> sizes, DType dtype, int world_size);

  const std::vector<std::int64_t>& counts() const { return counts_; }  // elements, by rank
  std::int64_t elements() const;
  /// flat [elements()] = scale * gradients, which are dense and may be of another floating dtype;
  /// an undefined one is zeros.
  void fill(const std::vector<TensorView>& gradients, const TensorView& flat, double scale) const;
  /// Where the gradient's part lies in the rank's [counts()[rank]].
  TensorView part(const TensorView& of_rank, int rank, std::size_t gradient) const;

 private:
  std::int64_t padded(int rank, std::size_t gradient) const;

  std::vector<std::int64_t> sizes_, counts_;
  std::int64_t alignment_;  // elements
  int world_size_;
};

}  // namespace cairn::parallel
