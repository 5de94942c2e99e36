// Whether the ranks of a job hold the same bits: weights, masters or moments that have drifted
// apart show here, by name, long before they show in a loss.
//
//   if (step % 1000 == 0) parallel::check_same_across_ranks(model.parameters(), group);
//
// Each tensor is hashed on its device (kernels::hash_tensors: one pass, 8 bytes a tensor come
// back), and the ranks exchange 32 bytes; only where these differ do they exchange a line and a
// hash per tensor. Differences escape with a chance of 2^-64 a tensor. Views of a foreign trainer's
// memory: Tensor::wrap.
#pragma once

#include <string>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// The same on every rank.
struct RankDifference {
  std::string tensor;       // the first of the list that is not the same everywhere; empty: all are
  std::vector<int> ranks;   // whose bits of it are not rank 0's
  std::size_t tensors = 0;  // how many of the list differ on any rank

  bool none() const { return tensors == 0; }
  /// "'fc.weight' is not rank 0's on ranks 1, 3 (and 4 more tensors differ)"; empty where none().
  std::string describe() const;
};

/// A collective: every rank calls it, with tensors of the same names, shapes, dtypes and dense
/// layouts in the same order (any dtype, any device of its own). Throws InvalidArgument, on every
/// rank, where these lists differ, naming the first entry that does, and where a rank's tensor
/// cannot be hashed (no dense layout), naming rank and cause.
RankDifference compare_across_ranks(const NamedTensors& tensors, const ProcessGroup& group);

/// Throws core::DataError, on every rank, with the description of a difference.
void check_same_across_ranks(const NamedTensors& tensors, const ProcessGroup& group);

}  // namespace cairn::parallel
