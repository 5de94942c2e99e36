// What a training step takes with which means of saving memory, before anything is trained.
//
//   checkpointing::TrainingPlan plan =
//       checkpointing::plan_training(model, {x, labels}, 1ull << 30);
//   log::info("\n{}", plan.table());
//   const checkpointing::TrainingChoice& choice = plan.best();  // throws OutOfMemory: nothing fits
//   for (const auto& batch : loader) {                          // of choice.micro_batch samples
//     precision.backward(choice.loss(model, batch.inputs, batch.labels));
//   }
//
// The choice says how amp is to be initialized, the optimizer's state kept and the batch cut; its
// loss() runs the model as planned.
//
// On the CPU the budget is the process's, as plan_recomputation's is; of several devices of one
// process, and of a GPU, it is of each device's live tensors.
//
// Planning runs each module a few times by itself, forward and backward, at each precision and size
// of micro-batch, with the device capped at the budget: it takes one block's memory and some steps'
// time. The fastest choices are then timed once more, by turns, until they differ for sure: what
// else the machine does must not choose. Sizes that do not run in the budget are not offered. Where
// none does, the smallest runs beyond the budget, module by module, in all that the machine has
// left: what a module makes for itself shows only when it runs, and best() is to name the least
// budget that would do, exactly. core::set_memory_capacity bounds that too; where nothing runs
// below it, best() names no number. Weights, gradients and optimizer state are counted, and an
// update is timed on as many elements as there is room for. Peaks are those of
// core::MemoryStats::peak_total from the second step on (the first step of a half model that
// accumulates turns its gradients to f32 and holds both for a moment, unless
// GradientArena::use_f32_slots() came first).
//
// No choice learns anything else than the batch at its precision would, but for rounding, unless an
// option allows it (split_batch_norms, compact_state); the table marks those that do.
//
// Of several ranks (TrainingWorld) a choice says what they divide (ZeRO), where an option offers
// it. Bytes are those of the rank that has most: parts as core::even_part cuts them, whole
// gradients until their bucket is reduced, whole weights of the module at work and the next.
// Seconds are those of this rank's modules, of an update of its part, and of the bytes that it
// sends over a link:
//
//   checkpointing::TrainingPlan plan = checkpointing::plan_training(
//       model, {x, labels}, 1ull << 30, {.ranks = 4, .bandwidth = 2e9},
//       {.shardings = checkpointing::shardings(), .states_folder = "/scratch"});
//   const checkpointing::TrainingChoice choice = plan.best(group.world());  // rank 0's, on all
//
// Nothing here knows of amp, optimizers or process groups: their means are described (Precision,
// TrainingWorld, Sharding), and who reads a choice acts on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cairn/checkpointing/planner.h"
#include "cairn/core/dtype.h"
#include "cairn/core/tensor.h"

namespace cairn::nn {
class Sequential;
}

namespace cairn::core {
class World;
}

namespace cairn::checkpointing {

/// How a level of amp computes.
struct Precision {
  std::string name = "O0";
  DType half = DType::f32;    // f32: everything is
  bool autocast = false;      // O1: products in half, weights stay f32
  bool half_weights = false;  // O2: all but batch norms' are half, beside f32 masters
};
/// O0, O1 in bf16 and f16, O2 in bf16 and f16.
std::vector<Precision> precisions();

/// What ranks divide among each other, by the stages of ZeRO: parallel::ZeroStage's numbers.
enum class Sharding : std::uint8_t {
  none = 0,              // each has all of it (parallel::DistributedDataParallel)
  optimizer_states = 1,  // moments and master weights
  gradients = 2,         // these too
  parameters = 3,        // weights too
};
/// All of them.
std::vector<Sharding> shardings();

/// One batch of one rank. Micro-batches are slices along `dimension`.
struct TrainingBatch {
  Tensor x, target;
  int dimension = 0;
};

/// Who trains beside this device.
struct TrainingWorld {
  int ranks = 1;    // processes with a batch each, whose gradients are averaged
  int devices = 1;  // of this process, that share a batch (parallel::DataParallel)
  /// Bytes a second that each rank sends while it receives as many; 0: not counted in the time.
  /// Nothing is taken to be hidden behind computation.
  double bandwidth = 0;
  /// Neighbours in rank order that share a host; must divide `ranks`. Of several hosts each
  /// division is also offered within a host, with copies across
  /// (parallel::ShardedOptions::shard_within). 0: nobody says.
  int ranks_per_host = 0;
  /// Of what ranks of a host send each other; 0: as `bandwidth`.
  double host_bandwidth = 0;
  /// As parallel::DistributedOptions has them: gradients that ranks divide are whole until one of
  /// their buckets is full.
  std::size_t first_bucket_bytes = 1 << 20, bucket_bytes = 25 << 20;
};

struct TrainingPlanOptions {
  /// Mean over the batch. Unset: cross-entropy; then a Linear at the model's end can be fused with
  /// it.
  std::function<Tensor(const Tensor& y, const Tensor& target)> loss;
  std::vector<Precision> precisions = checkpointing::precisions();
  /// Sizes, each of which is offered. Empty: the batch, a half of it, a quarter ... 1; of a model
  /// that trains batch norms the batch alone, without split_batch_norms.
  std::vector<std::int64_t> micro_batches;
  /// Lets the statistics of batch norms be those of a micro-batch.
  bool split_batch_norms = false;
  int moments = 2;  // that the optimizer keeps of each parameter: 2 Adam, 1 momentum, 0 plain SGD
  /// Offers moments in bf16, which rounds them, and with them, for bf16 weights, masters as
  /// remainders, which does not.
  bool compact_state = false;
  bool fused_loss = true;                 // offers nn::linear_cross_entropy
  std::optional<OffloadOptions> offload;  // given: offers it
  /// What ranks may divide. More than nothing wants TrainingWorld::bandwidth, and one device a
  /// process.
  std::vector<Sharding> shardings = {Sharding::none};
  /// Given: offers masters and moments in files of this folder (optim::StateOptions::folder).
  std::string states_folder;
  /// Bytes a second that the folder takes, and gives; 0: an update in its files is timed (on the
  /// CPU).
  double states_bandwidth = 0;
  /// Offers f32 masters and moments in the host's memory, whose kernels update them
  /// (optim::StateOptions::on_host); of a model on a GPU. The budget does not count them.
  bool states_on_host = false;
  /// The budget is of live tensors, as PlanOptions::tensors_only.
  bool tensors_only = false;
  int repeats = 1;  // timed runs of each module
};

/// One combination of means, with what it is predicted to take.
struct TrainingChoice {
  Precision precision;
  std::int64_t micro_batch = 0;    // samples of each forward (over all devices of the process)
  int dimension = 0;               // along which they lie
  std::int64_t micro_batches = 1;  // before an update
  bool compact_state = false;      // optim::StateOptions{bf16, remainder (bf16 weights)}
  // Another result than the batch would have: statistics are of a micro-batch; moments are rounded.
  bool splits_batch_norms = false, rounds_moments = false;
  bool fused_loss = false;
  bool balanced_loss = true;  // several devices: outputs stay where they are (DataParallelModel)
  Schedule schedule;          // of the modules; the loss runs with the last
  bool recomputes = false, offloads = false;
  Sharding sharding = Sharding::none;  // what ranks divide
  int shard_within = 0;                // as many ranks, a host's; 0: all
  bool states_in_files = false;        // of TrainingPlanOptions::states_folder
  bool states_on_host = false;         // optim::StateOptions::on_host

  bool fits = false;
  std::size_t peak_bytes = 0;   // of live tensors
  std::size_t beside = 0;       // what the process takes more, where the budget is the process's
  double seconds = 0;           // a step: all micro-batches, the update and the exchange
  double update_seconds = 0;    // of them: checks and updates what this rank has, to files and back
  double exchange_seconds = 0;  // of them: what this rank sends to the others
  // What stands through the step, and what comes on top at its peak.
  std::size_t weights = 0, gradients = 0, optimizer_state = 0, other = 0, activations = 0;
  std::size_t in_files = 0;  // of masters and moments, in no account of memory
  std::size_t on_host = 0;   // of the same, in pinned memory

  /// The loss of a micro-batch by this choice. The model may have been initialized by amp since,
  /// and is the planned one or one that is built alike. On several devices: of each device's part,
  /// or, without balanced_loss, the output of each, which is gathered (parallel::gather) for
  /// loss_function. Throws InvalidArgument for more samples than micro_batch.
  Tensor loss(nn::Sequential& model, const Tensor& x, const Tensor& target) const;
  /// The model's output, without the loss. Not for a fused loss, which makes none.
  Tensor output(nn::Sequential& model, const Tensor& x) const;
  bool changes_results() const { return splits_batch_norms || rounds_moments; }
  std::string describe() const;  // "O2 bf16, 4 x 8, recompute, ZeRO 2, compact state"

  // How loss() runs.
  std::function<Tensor(const Tensor& y, const Tensor& target)> loss_function;
  std::shared_ptr<Offload> offload;

 private:
  Tensor run(nn::Sequential& model, const Tensor& x, const Tensor* target) const;
};

class [[nodiscard]] TrainingPlan {
 public:
  TrainingPlan(std::vector<TrainingChoice> choices, std::size_t budget);
  /// `least`: of all that was tried, listed or not, the one that takes least memory.
  TrainingPlan(std::vector<TrainingChoice> choices, std::size_t budget, TrainingChoice least);

  /// Those that fit, the fastest first; then the others, the smallest first.
  const std::vector<TrainingChoice>& choices() const { return choices_; }
  /// The fastest that fits. Throws core::OutOfMemory, which says what the smallest takes.
  const TrainingChoice& best() const;
  /// The same on every rank: rank 0's, whose schedule all run, as measures of ranks differ. A
  /// collective; every rank has planned the same model, batch and options. Throws on every rank.
  TrainingChoice best(const core::World& world) const;
  /// Of all that was tried, the one that takes least memory, however slow. Throws core::OutOfMemory
  /// where nothing ran.
  const TrainingChoice& least() const;
  std::size_t budget() const { return budget_; }
  /// For people: what is chosen, the least budget that would do, the `rows` fastest choices that
  /// fit, and as many of those that do not. What changes results has a star.
  std::string table(std::size_t rows = 12) const;

 private:
  std::vector<TrainingChoice> choices_;
  std::size_t budget_;
  std::optional<TrainingChoice> least_;  // none: nothing ran
};

/// Before amp::initialize, with an f32 model that has no gradients, on the batch's device. An
/// optimizer may exist or not. Throws core::InvalidArgument where that is not so, and
/// core::Unsupported, naming it, for a module that cannot be cloned (at precisions with half
/// weights).
TrainingPlan plan_training(nn::Sequential& model, const TrainingBatch& batch, std::size_t budget,
                           const TrainingWorld& world = {},
                           const TrainingPlanOptions& options = {});

}  // namespace cairn::checkpointing
