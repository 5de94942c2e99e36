// ShardedOptimizerStates: ranks divide masters and moments (ZeRO, stage 1) for a trainer with
// arrays and gradients of its own. (A model of cairn::nn has ShardedDataParallel.)
//
//   parallel::Reducer reducer(group);                              // as without
//   parallel::ShardedOptimizerStates states(group, parameters);    // before the optimizer
//   optim::FusedAdam optimizer(parameters, {.lr = 1e-3});
//   amp::ScaledStep scaled(optimizer, {}, reducer.world());
//
// Each rank updates core::even_part() of every parameter from the whole average of its gradient,
// and gets the others' parts: the bits are those without. A parameter may be all of a flat buffer:
// parts cross its tensors then. An optimizer's state is this rank's shards (core::Shard), which a
// TrainingState writes from all ranks and loads into any number of them.
#pragma once

#include <memory>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

class ShardedOptimizerStates {
 public:
  /// Of wrapped parameters (optim::wrap_parameter): row-major, the same on every rank. A
  /// collective. Throws InvalidArgument, on every rank, naming the first parameter that differs
  /// between ranks, is given twice or whose gradient something else reduces or an optimizer has
  /// already.
  ShardedOptimizerStates(const ProcessGroup& group, const NamedTensors& parameters);
  /// The optimizer takes no step after it (InvalidArgument).
  ~ShardedOptimizerStates();
  ShardedOptimizerStates(ShardedOptimizerStates&&) noexcept;
  ShardedOptimizerStates& operator=(ShardedOptimizerStates&&) noexcept;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
