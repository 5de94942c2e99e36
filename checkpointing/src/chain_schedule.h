// Schedules of chains: the fastest one for an amount of memory, and what a schedule takes. Memory is
// above what stands when the chain begins, its input included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cairn/checkpointing/planner.h"

namespace cairn::checkpointing {

struct ScheduleCost {
  std::size_t peak = 0;  // bytes
  double seconds = 0;
};

/// Walks through a step by what each block was measured to take and to keep. The result of the chain
/// is held until the end.
ScheduleCost simulate(const std::vector<BlockProfile>& blocks, const Schedule& schedule);

/// Every block kept.
Schedule plain_schedule(std::size_t blocks);

/// Rotor's dynamic programme, for each amount of memory up to what plain training takes. In its
/// model a kept block keeps `saved` and `output`, an offloaded one the same of `offloaded`: a third way
/// for the blocks outside of segments.
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
  struct KeptSizes {
    std::size_t kept, forward, backward;  // steps
    double seconds;
  };
  struct Sizes {
    std::size_t output, light, gradient;  // steps; gradient with the lead
    KeptSizes here, elsewhere;
  };
  // How a range begins: a kept block, an offloaded one, or that many blocks recomputed.
  using Choice = std::uint16_t;
  static constexpr Choice kKeep = 0;
  static constexpr Choice kNone = UINT16_MAX;
  static constexpr Choice kOffload = UINT16_MAX - 1;

  std::size_t index(std::size_t s, std::size_t t, std::size_t m) const;
  double cost(std::size_t s, std::size_t t, std::size_t m) const { return cost_[index(s, t, m)]; }
  void solve(std::size_t s, std::size_t t);
  void try_keep(std::size_t s, std::size_t t, const KeptSizes& block, Choice choice);
  void try_recompute(std::size_t s, std::size_t t, std::size_t count, std::size_t least);
  void offer(std::size_t s, std::size_t t, std::size_t m, double cost, Choice choice);
  Schedule collect(std::size_t s, std::size_t t, std::size_t m) const;

  std::vector<BlockProfile> blocks_;
  std::vector<Sizes> sizes_;
  std::size_t unit_ = 1, steps_ = 0;
  std::vector<float> cost_;
  std::vector<Choice> choice_;
};

}  // namespace cairn::checkpointing
