// Schedules of chains: the fastest one for an amount of memory, and what a schedule takes. Memory
// is above what stands when the chain begins, its input included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cairn/checkpointing/planner.h"
#include "plan/gathered_weights.h"

namespace cairn::checkpointing {

struct ScheduleCost {
  std::size_t peak = 0;  // bytes
  double seconds = 0;
};

/// Walks through a step by what each block was measured to take and to keep, and what stands
/// beside. The result of the chain is held until the end.
ScheduleCost simulate(const std::vector<BlockProfile>& blocks, const Schedule& schedule,
                      const ChainBeside& beside = {});

/// Every block kept.
Schedule plain_schedule(std::size_t blocks);

/// Rotor's dynamic programme, for each amount of memory up to what plain training takes. In its
/// model a kept block keeps `saved` and `output`, and so does each further way of it, of which the
/// offloaded one is for blocks outside of segments. The gradients of parameters that the backward
/// has passed stand beside.
class ChainProgramme {
 public:
  static constexpr std::size_t kMostBlocks = 128;
  /// Counts memory in `slots` steps, rounded up; 0: in bytes.
  ChainProgramme(const std::vector<BlockProfile>& blocks, std::size_t slots);

  std::size_t steps() const { return steps_; }  // memory amounts are 0 .. steps()
  std::size_t bytes_of(std::size_t m) const { return m * unit_; }
  /// Of the fastest schedule within m steps; infinite where there is none. Never grows with m.
  double seconds(std::size_t m) const;
  std::optional<Schedule> schedule(std::size_t m) const;

 private:
  // How a block is kept.
  struct Way {
    std::size_t kept, forward, replay, backward;  // steps
    double seconds, tail_seconds;
    bool outside_only = false;
  };
  struct Sizes {
    std::size_t output, light, gradient;  // steps; gradient with the lead
    std::vector<Way> ways;
  };
  // How a range begins: that many blocks recomputed, or, from kWays on, a block kept in one of its
  // ways.
  using Choice = std::uint16_t;
  static constexpr Choice kWays = 256;
  static constexpr Choice kNone = UINT16_MAX;
  static_assert(kMostBlocks < kWays);

  std::size_t steps_of(std::size_t bytes) const;
  std::vector<Way> ways_of(const BlockProfile& block) const;
  SchedulePart part_of(std::size_t block, std::size_t way) const;
  std::size_t index(std::size_t s, std::size_t t, std::size_t m) const;
  const float* row(std::size_t s, std::size_t t) const { return &cost_[index(s, t, 0)]; }
  void solve(std::size_t s, std::size_t t);
  void try_keep(std::size_t s, std::size_t t, std::size_t way);
  void try_recompute(std::size_t s, std::size_t t, std::size_t count, std::size_t least);
  struct Offer {
    double seconds;
    const float* rest = nullptr;  // of the blocks behind, by memory
    std::size_t kept = 0;         // memory that they do not have
    const float* inner = nullptr;
  };
  void offer(std::size_t s, std::size_t t, std::size_t least, Choice choice, const Offer& offered);
  Schedule collect(std::size_t s, std::size_t t, std::size_t m) const;

  std::vector<BlockProfile> blocks_;
  std::vector<Sizes> sizes_;
  std::vector<std::size_t> later_;  // steps of the gradients of the blocks behind each
  std::size_t unit_ = 1, steps_ = 0;
  std::vector<float> cost_;
  std::vector<Choice> choice_;
};

}  // namespace cairn::checkpointing
