// Which blocks of a chain to recompute, whole or but for the results of some operations, and which
// to offload, so that a training step fits a budget of memory in the least time.
//
//   checkpointing::RecomputationPlan plan =
//       checkpointing::plan_recomputation(model, x, 2ull << 30);
//   log::info("{}", plan.report());
//   plan.apply(model);                     // or: Tensor y = plan.run(x);
//
// Planning runs each block a few times by itself, forward and backward, and measures its time, what
// it keeps for its backward, and its peaks: kept whole, recomputed, and with the results of those
// operations kept that take the most time for their bytes, one after another. Blocks that run the
// same operations in the same memory are measured once. No more memory is used than one block
// takes, beside one activation, and none beyond a budget that a schedule fits. Then the dynamic
// programme of Rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv
// 1911.13214), with these ways for each block, finds the fastest schedule among those that keep
// what they have stored until it is used, and a simulation of the schedule with what was really
// measured says its peak. Of chains of more than 128 blocks, neighbours are treated alike.
//
// On the CPU a budget is the process's (VmHWM), because that is what the system kills: what the
// process holds beside live tensors once the blocks are measured, its code, what libraries keep and
// the trainer's own data, is subtracted. From then on the allocator keeps no more, live and cached
// together, than the budget leaves (core::set_cache_bound; a plan for SIZE_MAX bytes lifts that).
// On a GPU a budget is of the device's live tensors.
//
// What is outside of the chain when the plan is made, weights and optimizer state for example, is
// part of the peak; a loss that is computed afterwards is not, so make it the last block.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cairn/checkpointing/offload.h"
#include "cairn/checkpointing/recompute.h"

namespace cairn::checkpointing {

/// A block that is kept, as it was measured. Bytes; peaks are above what stands when it begins, its
/// input included.
struct KeptBlock {
  double forward_seconds = 0;
  double backward_seconds = 0;
  std::size_t saved = 0;  // kept for the backward beside input and output
  bool saves_input = false;
  bool saves_output = false;
  std::size_t forward_peak = 0;   // running and keeping what the backward needs
  std::size_t backward_peak = 0;  // with what was kept, and the gradient of the output
  /// The replay of a segment ends with the last tensor that is kept: the peak of the forward up to
  /// there, and its time from there on, which the last block of a replay does not take.
  std::size_t replay_peak = 0;
  double tail_seconds = 0;
};

/// Operations of a block whose results it keeps while it recomputes the others; none: it keeps its
/// input alone. Null: it is not recomputed.
using KeptResults = std::shared_ptr<const std::vector<SegmentOperation>>;

/// A block that is a recomputed segment of its own; its backward has the replay.
struct SelectiveBlock : KeptBlock {
  KeptResults results;
};

/// One block as it was measured.
struct BlockProfile : KeptBlock {
  std::size_t output = 0;      // of the result; 0 where it is a view of the input
  std::size_t light_peak = 0;  // running and keeping nothing
  std::size_t gradient = 0;    // of the output
  std::size_t lead = 0;  // that the backward has made when it first asks for what was kept: then a
                         // replay begins
  std::size_t cached = 0;  // half copies of weights: until the autocast region ends, or in each
                           // replay anew
  std::size_t cached_and_kept = 0;      // of them, those that a kept block has until its backward
  std::size_t parameter_gradients = 0;  // that the backward leaves in memory of their own
  std::size_t peak_before_loss = 0;     // of the forward, up to a loss that has not its input any
                                        // more; 0: none
  /// The same with what its operations save offloaded: the times hold the copies, which nothing
  /// else waits for.
  std::optional<KeptBlock> offloaded;
  /// From the one that keeps its input alone to the one that keeps all that is worth its bytes.
  std::vector<SelectiveBlock> selective;
};

struct PlanOptions {
  /// Several backwards run before gradients are cleared: the peak counts all of them from the
  /// start.
  bool accumulates = false;
  /// The budget is of live tensors, not of all that the process takes. Of a GPU it always is.
  bool tensors_only = false;
  int repeats = 3;  // runs of each kind of block in each way; the fastest counts
  int memory_slots =
      500;  // steps in which memory is counted; of short chains up to 8 times as many
  /// Given: blocks may be offloaded, where that is faster than to run them again. Each goes out
  /// before the next one runs and comes back when its backward asks.
  std::optional<OffloadOptions> offload;
};

/// A run of the schedule: one block that is kept, here, elsewhere or in part, or several that are
/// recomputed, as `inner` says.
struct SchedulePart {
  std::size_t begin = 0, end = 0;
  std::vector<SchedulePart> inner = {};  // empty: one block, kept
  bool offloaded = false;                // one that is kept elsewhere; outside of segments only
  KeptResults results = nullptr;         // not null: one of which only these are kept
};
using Schedule = std::vector<SchedulePart>;

class [[nodiscard]] RecomputationPlan {
 public:
  RecomputationPlan(std::vector<Segment> blocks, std::vector<BlockProfile> profile,
                    Schedule schedule, std::size_t standing_bytes,
                    std::shared_ptr<Offload> offload = nullptr);

  /// The blocks one after another, recomputed by the schedule. For inputs of the planned shape.
  Tensor run(const Tensor& x) const;
  /// From now on a call of the Sequential runs its modules by the schedule, inside of what amp has
  /// put around it; so do its clones. Of the one that was planned, or a clone.
  void apply(nn::Sequential& model) const;

  // Predictions for a step: the device's peak of live tensors (core::MemoryStats::peak_total), and
  // forward and backward. `plain`: without recomputation.
  std::size_t peak_bytes() const { return peak_bytes_; }
  double seconds() const { return seconds_; }
  double plain_seconds() const { return plain_seconds_; }

  const std::vector<BlockProfile>& profile() const { return profile_; }
  const Schedule& schedule() const { return *schedule_; }
  /// The schedule and the predictions, for people: "[0 1 [2 3]] 4 (5) 6 [7]a" keeps blocks 4 and 6,
  /// offloads 5 and recomputes 0 to 3, of which 2 and 3 once more, and 7 but for the results that
  /// "a: linear 0, self_attention" names, each with its number among the operations of this name.
  std::string report() const;

 private:
  std::shared_ptr<const std::vector<Segment>> blocks_;
  std::vector<BlockProfile> profile_;
  std::shared_ptr<const Schedule> schedule_;
  std::shared_ptr<Offload> offload_;
  std::size_t peak_bytes_ = 0, plain_peak_bytes_ = 0;
  double seconds_ = 0, plain_seconds_ = 0;
};

/// The fastest schedule that is predicted to take at most `budget` bytes, of the process or of the
/// live tensors on input's device (PlanOptions::tensors_only, GPUs). Where a block does not run in
/// them, all run in what the machine has left, for the error to say what would do. Generator
/// and batch norms' statistics stand afterwards where they stood. Gradients must be empty, and
/// hooks of a data-parallel model see the backwards: plan before it is made. Throws
/// core::InvalidArgument where a parameter has a gradient, core::OutOfMemory where no schedule
/// fits; it says what the smallest takes.
RecomputationPlan plan_recomputation(const std::vector<Segment>& blocks, const Tensor& input,
                                     std::size_t budget, const PlanOptions& options = {});
/// The same over a Sequential's modules, which must live as long as the plan.
RecomputationPlan plan_recomputation(nn::Sequential& model, const Tensor& input, std::size_t budget,
                                     const PlanOptions& options = {});

}  // namespace cairn::checkpointing
