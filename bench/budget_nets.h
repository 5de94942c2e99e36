// Nets that are trained within a budget of the process, planned by
// checkpointing::plan_recomputation, in a process of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bench {

/// Of each the loss is the last block.
std::vector<std::string> budget_nets();

struct BudgetRun {
  std::size_t start = 0;        // bytes of the process before it
  std::size_t planning = 0;     // at most while it was planned
  std::size_t after = 0;        // when it was planned
  std::size_t before = 0;       // ahead of that
  std::size_t process = 0;      // at most, in all
  std::size_t beside = 0;       // at the end, what is no tensor
  std::uint64_t gradients = 0;  // a checksum of those of all steps
  std::size_t least = 0;        // bytes that the planner asked for; 0: it found a schedule
  std::string schedule;
  double planning_seconds = 0, seconds = 0;  // of planning; of the last step
};

/// Trains a net for `steps` steps of SGD; a budget of 0 bytes: plainly, without a plan.
BudgetRun run_within_budget(const std::string& net, std::size_t budget, int steps);

}  // namespace bench
