// ShardedDataParallel: DistributedDataParallel whose ranks divide the optimizer's state among each
// other (ZeRO, stage 1; Rajbhandari et al. 2020; PyTorch's ZeroRedundancyOptimizer, DeepSpeed's
// "stage": 1), or gradients too (stage 2). Of n parameters in half precision a rank of N keeps 2 n
// bytes of weights, 2 n or 2 n / N of gradients and 12 n / N of masters and moments, where
// DistributedDataParallel keeps 16 n.
//
//   parallel::ShardedDataParallel sharded(model, group);     // in place of DistributedDataParallel
//   optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
//   amp::Amp precision = amp::initialize(model, optimizer, {.world = sharded.world()});
//
// Each parameter is cut evenly over the ranks, at multiples of 1,024 elements. Gradients are
// averaged as DistributedDataParallel does, on every rank, or (stage 2) each rank gets its part of
// them; a step checks and measures all of them, updates this rank's part of every weight, and
// gathers the others' (in the weights' dtype). The weights, the norms and the skips are those of
// DistributedDataParallel, bit for bit (in stage 2 where the engine adds up in rank order: NCCL does
// so for two ranks). An optimizer whose update looks at whole tensors (FusedLAMB, LARC) gives each
// of them to one rank instead, in stage 1; in stage 2 it is Unsupported.
//
// In stage 2 every backward reduces: several in a step add up in f32 sums of this rank's parts
// (no_sync() is Unsupported), and grad() is InvalidArgument, because no rank has the whole.
//
// A step is a collective. Where a rank cannot take its part in one (it is out of memory), the group
// breaks and says so. Sharded and plain optimizers may be constructed before or after; those that
// hold states already let go of the other ranks' parts at the next step.
//
// States (optimizer.state_dict(), model.state_dict() of half weights) hold core::Shards: every rank
// of a checkpointing::TrainingState saves its own, and a checkpoint resumes with any number of
// ranks, sharded or not, with the same bits.
//
// What needs the exact value of a whole half weight is Unsupported meanwhile: amp's release() and
// fallback_after, optim::WeightAverage of half weights, torch_state_dict(), clones. A checkpoint
// holds it. Parameters are row-major.
#pragma once

#include <cstdint>

#include "cairn/parallel/distributed.h"

namespace cairn::parallel {

/// What the ranks divide among each other.
enum class ZeroStage : std::uint8_t {
  optimizer_states = 1,  // moments and master weights
  gradients = 2,         // these too, once they are reduced
};

struct ShardedOptions {
  ZeroStage stage = ZeroStage::optimizer_states;
  DistributedOptions distributed;
};

class ShardedDataParallel : public DistributedDataParallel {
 public:
  /// Throws as DistributedDataParallel.
  ShardedDataParallel(nn::Module& model, ProcessGroup group, const ShardedOptions& options = {});

  ZeroStage stage() const { return stage_; }

 private:
  ZeroStage stage_;
};

}  // namespace cairn::parallel
