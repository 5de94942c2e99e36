// DistributedDataParallel::Join: ranks that have run out of batches shadow the others' collectives.
//
// Before a collective each rank tells which one comes: the buffers of a forward, the gradients of a
// backward; or that it has no batch and does what the others do.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/parallel/distributed.h"

namespace cairn::parallel {

class UnevenInputs {
 public:
  explicit UnevenInputs(DivideBy divide_by) : divide_by_(divide_by) {}

  enum class Next : std::uint64_t { forward, backward, out_of_batches };
  struct Rank {
    Next next = Next::out_of_batches;
    std::int64_t samples = 0;
  };
  using Ranks = std::vector<Rank>;

  /// A collective. Throws InvalidArgument, on all ranks, where some are in a forward and others in
  /// a backward.
  Ranks announce(Next next, const ProcessGroup& group);
  /// What gradients are multiplied by ahead of the reduction and averages behind it.
  struct Weights {
    double before = 1.0, after = 1.0;
  };
  /// A backward that reduces begins. Announces it, unless this rank shadows one. Throws
  /// InvalidArgument, on all ranks, for DivideBy::samples without a count.
  Weights begin_backward(const ProcessGroup& group, bool average);
  void end_backward() { shadowed_.clear(); }
  /// A rank without a batch: what the others do next. It shadows a backward.
  struct Others {
    Next next = Next::out_of_batches;
    int first = 0;  // of the ranks that do it
  };
  Others next_of_others(const ProcessGroup& group);

  bool shadows() const { return !shadowed_.empty(); }
  bool over() const { return over_; }
  void set_samples(std::int64_t count) { samples_ = count; }

 private:
  DivideBy divide_by_;
  std::int64_t samples_ = 0;
  bool over_ = false;  // no rank has a batch
  Ranks shadowed_;     // the backward that zero() takes part in, as announced
};

}  // namespace cairn::parallel
