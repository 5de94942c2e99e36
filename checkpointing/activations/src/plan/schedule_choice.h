// The fastest schedule of a chain for any amount of memory.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/chain_schedule.h"

namespace cairn::checkpointing {

struct CostedSchedule {
  Schedule schedule;
  ScheduleCost cost;
};

/// The simple strategies (plain; segments of each length; the first blocks recomputed; halves
/// within halves) and what the programme finds for each amount of memory, for neighbours together
/// where there are more than ChainProgramme::kMostBlocks.
class ScheduleChoice {
 public:
  ScheduleChoice(const std::vector<BlockProfile>& profile, std::size_t slots);

  /// The fastest whose peak is at most `room` bytes; null: none.
  const CostedSchedule* fastest(std::size_t room) const;
  const CostedSchedule& smallest() const;  // of the least peak
  const CostedSchedule& plain() const { return all_.front(); }

 private:
  void offer(const std::vector<BlockProfile>& profile, Schedule schedule);

  std::vector<CostedSchedule> all_;
};

}  // namespace cairn::checkpointing
