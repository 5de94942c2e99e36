// How ranks divide the elements of a tensor among each other (ZeRO).
#pragma once

#include <cstdint>

#include "cairn/core/tensor.h"

namespace cairn::core {

/// Elements [begin, end) of a dense tensor, in the order of its memory.
struct ElementRange {
  std::int64_t begin = 0, end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

inline constexpr std::int64_t kPartBlock = 1024;  // elements

/// Part `rank` of an even cut at multiples of kPartBlock, so that sums over a tensor, which are sums
/// of blocks, do not depend on the cut. Parts differ by at most a block, follow each other in rank
/// order, and may be empty. The cut depends on nothing else, so that a part stays with its rank
/// whatever becomes of the tensors beside it.
ElementRange even_part(std::int64_t numel, int rank, int world_size);

/// A weight of which each rank updates its part.
struct ShardedWeight {
  Tensor weight;
  int owner = -1;  // the rank that has all of it; -1: an even cut

  ElementRange part(int rank, int world_size) const;
};

/// The same elements of a dense view: [n].
TensorView part_of(const TensorView& x, ElementRange part);

}  // namespace cairn::core
