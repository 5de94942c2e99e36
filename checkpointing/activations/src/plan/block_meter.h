// What one block of a chain takes, measured by running it alone, forward and backward.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cairn/checkpointing/planner.h"
#include "plan/operation_meter.h"
#include "plan/planning_budget.h"

namespace cairn::checkpointing {

/// Blocks as they were measured. A later one that runs the same operations in the same memory, its
/// input's included, and in about the same time is taken for another of them, so that equal blocks
/// have equal times, whatever else the machine does, and each kind is measured once.
struct KnownBlocks {
  struct Known {
    std::size_t input = 0;  // bytes that it lies in, which an offloaded block brings back
    MeteredForward forward;
    BlockProfile profile;
    double seconds = 0;  // of the one run that others are compared with
  };
  std::vector<Known> all;
};

struct MeterOptions {
  int repeats = 1;                   // timed runs, of which the fastest counts
  bool placed = false;               // gradients of parameters have memory before the backward
  bool sums = false;                 // which is f32, as of several micro-batches
  bool accumulates = false;          // and hold something, which the backward adds to
  Offload* offload = nullptr;        // given: the block is measured with it, too
  KnownBlocks* known = nullptr;      // given: of the same options
  std::size_t chain = 1;             // blocks that the chain has
  PlanningBudget* budget = nullptr;  // given: refreshed before each block
  bool times_only = false;           // of one step, and nothing else
  /// Given: the block ends with a loss, and puts here the device's peak as that begins; 0 where
  /// the loss has the block's input.
  const std::size_t* before_loss = nullptr;
};

struct MeasuredBlock {
  BlockProfile profile;
  Tensor result;  // without a graph
  bool result_wants_gradient = false;
};

/// Times are those of a chain: where one of `chain` such blocks keeps more than caches hold, a
/// block is run so often before the first backward that what it kept comes from memory, as far as
/// the device's capacity goes. As in a replay, batch norms leave their statistics alone; generator
/// and gradients are as before. Throws core::InvalidArgument, as `op`, where a parameter has a
/// gradient.
MeasuredBlock measure_block(const char* op, const Segment& block, const Tensor& x,
                            bool wants_gradient, const MeterOptions& options);

/// One that brings back what is asked for and nothing more, so that its peak is known; null where
/// no options are given.
std::shared_ptr<Offload> planned_offload(std::optional<OffloadOptions> options);

/// A run of which nothing is left here but the result: what its operations save has gone out.
Tensor run_offloaded(const Segment& block, const Tensor& x, Offload& offload);

/// A run that keeps the input and these results; all else is recomputed.
Tensor run_selective(const Segment& block, const Tensor& x, const KeptResults& results);

/// Each by itself, on the result of the one before.
std::vector<BlockProfile> measure_blocks(const char* op, const std::vector<Segment>& blocks,
                                         const Tensor& input, const MeterOptions& options);

}  // namespace cairn::checkpointing
