// ShardedOptimizerStates: ranks divide masters and moments (ZeRO, stage 1) for a trainer with
// arrays and gradients of its own. (A model of cairn::nn has ShardedDataParallel.)
//
//   parallel::Reducer reducer(group);                              // as without
//   parallel::ShardedOptimizerStates states(group, parameters);    // or later: it divides then
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
  /// Of wrapped parameters (optim::wrap_parameter): f16, bf16 or f32, of any shape, row-major, on
  /// one device, the same on every rank. A collective. Throws InvalidArgument, on every rank,
  /// naming the first parameter that differs between ranks, has no gradient of the trainer's own,
  /// or is divided or reduced by something else. Each step of the optimizer is a collective, in the
  /// order of the device's current stream.
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
