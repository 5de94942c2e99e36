// ShardedDataParallel: DistributedDataParallel whose ranks divide the optimizer's state among each
// other (ZeRO, stage 1; Rajbhandari et al. 2020; PyTorch's ZeroRedundancyOptimizer, DeepSpeed's
// "stage": 1), gradients too (stage 2), or weights too (stage 3; FSDP). Of n parameters in half
// precision a rank of N keeps 2 n bytes of weights (stage 3: 2 n / N), 2 n of gradients (stages 2
// and 3: 2 n / N) and 12 n / N of masters and moments, where DistributedDataParallel keeps 16 n.
//
//   parallel::ShardedDataParallel sharded(model, group);     // in place of DistributedDataParallel
//   optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
//   amp::Amp precision = amp::initialize(model, optimizer, {.world = sharded.world()});
//
// Each parameter is cut evenly over the ranks, at multiples of 1,024 elements. Gradients are
// averaged as DistributedDataParallel does, on every rank, or (stage 2) each rank gets its part of
// them; a step checks and measures all of them, updates this rank's part of every weight, and
// gathers the others' (in the weights' dtype; not in stage 3). The weights, the norms and the skips
// are those of DistributedDataParallel, bit for bit (in stages 2 and 3 where the engine adds up in
// rank order: NCCL does so for two ranks). Where an update looks at norms of whole tensors
// (FusedLAMB, LARC), the ranks tell each other those of their parts.
//
// With shard_within = n (hybrid sharding) groups of n neighbours divide a copy each, and the above
// holds with n in place of N; averages are over all ranks, with the same bits.
//
// In stages 2 and 3 several backwards in a step add up in f32 sums of this rank's parts: each one
// reduces. Under no_sync() gradients are whole instead (2 n bytes, 4 n from the second backward of
// half weights on), add up before they are averaged, and have the bits of DistributedDataParallel
// under no_sync() (of several losses: ahead of the first backward that reduces). What is reduced is
// a part: grad() is InvalidArgument, because no rank has the whole.
//
// In stage 3 a weight lies in parts from the first forward on. It is whole while its unit of the
// model (ShardedOptions::units) is in a forward, and from the first operation of a backward that
// needs it until the unit's gradients are there; the next unit is gathered meanwhile. All ranks run
// the same graph, unless find_unused_parameters or static_graph says that they do not: all units
// are gathered at the beginning of a forward, and of a backward, then, and whole until it has
// ended. A use of a weight elsewhere (an average, a clamp, an initialiser) is InvalidArgument
// unless gather_parameters() has made it whole. Forwards on the model itself gather as well, on
// every rank. A pointer from data() is good as long as the weight is whole. join() is Unsupported.
//
// A model that is described by nn::DeferredInit is born in parts: no process ever holds all of its
// weights (stage 3), or all of their masters (stages 1 and 2, from amp::initialize on).
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
// holds it. So are captured steps, at each stage. Parameters are row-major.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/parallel/distributed.h"

namespace cairn::parallel {

/// What the ranks divide among each other.
enum class ZeroStage : std::uint8_t {
  optimizer_states = 1,  // moments and master weights
  gradients = 2,         // these too, once they are reduced
  parameters = 3,        // weights too, while no forward or backward uses them
};

struct ShardedOptions {
  ZeroStage stage = ZeroStage::optimizer_states;
  DistributedOptions distributed;
  /// Hybrid sharding: so many neighbours in rank order (a host's ranks) divide one copy of what the
  /// stage divides, and each such group has a copy; gradients are averaged over all ranks. 0: all
  /// ranks divide one copy. Must divide the number of ranks. On GPUs, with ZeroStage::gradients or
  /// parameters, in one stream and without SyncBatchNorm (Unsupported).
  int shard_within = 0;

  // Of ZeroStage::parameters: InvalidArgument with another stage.
  /// The modules, by full name, whose weights are gathered as one ("block0", "block1.mlp"); what is
  /// in none of them is whole for all of a forward. Empty: each layer of the model, members of a
  /// Sequential or a ModuleList counting as layers.
  std::vector<std::string> units;
  /// false: weights stay whole from the forward to the backward, which gathers none then.
  bool reshard_after_forward = true;
  /// Between a forward and the backward so many neighbours (a host's ranks) of those that divide a
  /// copy keep a unit's weights among each other, and the backward gathers within them. Takes
  /// 1 / reshard_within of the weights meanwhile. 0: all who divide a copy; 1: as
  /// reshard_after_forward = false. Must divide shard_within, or the number of ranks. On GPUs in
  /// one stream and without SyncBatchNorm (Unsupported).
  int reshard_within = 0;
  /// So many of the next units are gathered while one works; each takes its memory. Neither this
  /// nor most_gathered with find_unused_parameters or static_graph (InvalidArgument).
  int prefetch = 1;
  /// A unit is gathered ahead only where the weights of all units that are whole or on their way
  /// have at most so many elements then. 0: no bound.
  std::int64_t most_gathered = 0;
  /// Weights of at most so many elements are not divided, and updated as in the other stages:
  /// biases and norms need no gather of their own then.
  std::int64_t keep_whole = 0;
};

class ShardedDataParallel : public DistributedDataParallel {
 public:
  /// Throws as DistributedDataParallel; also InvalidArgument, on every rank, for a shard_within
  /// that does not divide the number of ranks or that they do not share.
  ShardedDataParallel(nn::Module& model, ProcessGroup group, const ShardedOptions& options = {});

  ZeroStage stage() const { return stage_; }

 private:
  ZeroStage stage_;
};

}  // namespace cairn::parallel
