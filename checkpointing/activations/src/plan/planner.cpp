#include "cairn/checkpointing/planner.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "cairn/nn/sequential.h"
#include "plan/block_meter.h"
#include "plan/chain_schedule.h"
#include "plan/planning_budget.h"
#include "plan/schedule_choice.h"
#include "plan/schedule_run.h"

namespace cairn::checkpointing {

namespace {

constexpr const char* kPlanner = "plan_recomputation";
constexpr std::size_t kFinest = 8;  // times the slots of a long chain

Schedule choose(const std::vector<BlockProfile>& profile, std::size_t standing,
                const PlanningBudget& room, std::size_t budget, int slots) {
  const std::size_t finer = std::min(ChainProgramme::kMostBlocks / profile.size(), kFinest);
  const ScheduleChoice choice({profile},
                              static_cast<std::size_t>(slots) * std::max<std::size_t>(1, finer));
  const CostedSchedule* best =
      choice.fastest(room.of_tensors() > standing ? room.of_tensors() - standing : 0);
  if (best == nullptr) {
    core::fail<core::OutOfMemory>(kPlanner, "expected a budget of at least ",
                                  room.beside() + standing + choice.smallest().cost.peak,
                                  " bytes, of which ", room.beside() + standing,
                                  " stand when the step begins, got ", budget,
                                  " (smaller batches, or smaller blocks, take less)");
  }
  return best->schedule;
}

// Where a block does not run in the budget no schedule fits; for the error that says which budget
// would do, all run in what the machine has.
std::vector<BlockProfile> measure_within(PlanningBudget& room, const std::vector<Segment>& blocks,
                                         const Tensor& input, MeterOptions options) {
  options.budget = &room;
  try {
    return measure_blocks(kPlanner, blocks, input, options);
  } catch (const core::OutOfMemory&) {
    room.lift();
  }
  return measure_blocks(kPlanner, blocks, input, options);
}

}  // namespace

RecomputationPlan::RecomputationPlan(std::vector<Segment> blocks, std::vector<BlockProfile> profile,
                                     Schedule schedule, std::size_t standing_bytes,
                                     std::shared_ptr<Offload> offload)
    : blocks_(std::make_shared<const std::vector<Segment>>(std::move(blocks))),
      profile_(std::move(profile)),
      schedule_(std::make_shared<const Schedule>(std::move(schedule))),
      offload_(std::move(offload)) {
  const ScheduleCost chosen = simulate(profile_, *schedule_);
  const ScheduleCost plain = simulate(profile_, plain_schedule(profile_.size()));
  peak_bytes_ = standing_bytes + chosen.peak;
  plain_peak_bytes_ = standing_bytes + plain.peak;
  seconds_ = chosen.seconds;
  plain_seconds_ = plain.seconds;
}

Tensor RecomputationPlan::run(const Tensor& x) const {
  return run_schedule(*blocks_, *schedule_, offload_, x);
}

void RecomputationPlan::apply(nn::Sequential& model) const {
  CAIRN_CHECK(model.size() == profile_.size(), kPlanner, "expected the planned Sequential of ",
              profile_.size(), " modules, got one of ", model.size());
  model.set_runner(
      [schedule = schedule_, offload = offload_](nn::Sequential& modules, const Tensor& x) {
        return run_schedule(modules_of(modules), *schedule, offload, x);
      });
}

std::string RecomputationPlan::report() const {
  std::ostringstream out;
  out.precision(3);
  out << "blocks " << schedule_text(*schedule_) << ": peak "
      << static_cast<double>(peak_bytes_) / 1e6 << " MB instead of "
      << static_cast<double>(plain_peak_bytes_) / 1e6 << " MB, step " << 1e3 * seconds_
      << " ms instead of " << 1e3 * plain_seconds_ << " ms (predicted)";
  return out.str();
}

RecomputationPlan plan_recomputation(const std::vector<Segment>& blocks, const Tensor& input,
                                     std::size_t budget, const PlanOptions& options) {
  CAIRN_CHECK(!blocks.empty(), kPlanner, "expected blocks, got none");
  CAIRN_CHECK(options.repeats > 0 && options.memory_slots > 0, kPlanner,
              "expected repeats and memory_slots above 0, got ", options.repeats, " and ",
              options.memory_slots);
  const core::PassiveWaitGuard waits;  // the processors may be other programs', too
  PlanningBudget room(input.device(), budget, !options.tensors_only);
  std::size_t standing = core::memory_stats(input.device()).current_total;
  std::shared_ptr<Offload> offload = planned_offload(options.offload);
  std::vector<BlockProfile> profile = measure_within(
      room, blocks, input,
      {.repeats = options.repeats, .accumulates = options.accumulates, .offload = offload.get()});
  for (BlockProfile& block : profile) {
    if (!options.accumulates) break;
    standing += std::exchange(block.parameter_gradients, 0);
  }
  room.give_back();
  Schedule schedule = choose(profile, standing, room, budget, options.memory_slots);
  return {blocks, std::move(profile), std::move(schedule), standing, std::move(offload)};
}

RecomputationPlan plan_recomputation(nn::Sequential& model, const Tensor& input, std::size_t budget,
                                     const PlanOptions& options) {
  // Inside of a call, so that the input is cast and autocast is on where they will be.
  std::optional<RecomputationPlan> plan;
  const nn::Sequential::Runner before = model.runner();
  model.set_runner([&](nn::Sequential& modules, const Tensor& x) {
    plan.emplace(plan_recomputation(modules_of(modules), x, budget, options));
    return x;
  });
  try {
    model(input);
  } catch (...) {
    model.set_runner(before);
    throw;
  }
  model.set_runner(before);
  return *plan;
}

}  // namespace cairn::checkpointing
