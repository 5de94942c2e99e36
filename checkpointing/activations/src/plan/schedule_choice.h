// The fastest schedule of a chain for any amount of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/chain_schedule.h"

namespace cairn::checkpointing {

using ChainProfile = std::vector<BlockProfile>;

struct CostedSchedule {
  Schedule schedule;
  ScheduleCost cost;
  std::size_t peak_elsewhere = 0;  // on other devices
};

/// The simple strategies (plain; segments of each length; the first blocks recomputed; halves
/// within halves) and what the programme finds for each amount of memory, for neighbours together
/// where there are more than ChainProgramme::kMostBlocks. Times are of the first of the profiles,
/// peaks the largest of all: the others, here and on other devices, are of the same blocks, with
/// its ways, on other inputs.
class ScheduleChoice {
 public:
  ScheduleChoice(const std::vector<ChainProfile>& here, std::size_t slots,
                 const std::vector<ChainProfile>& elsewhere = {});

  /// The same schedules, with what stands beside the blocks here.
  ScheduleChoice with(const ChainBeside& beside) const;

  /// The fastest whose peaks are at most so many bytes; null: none.
  const CostedSchedule* fastest(std::size_t room, std::size_t room_elsewhere = SIZE_MAX) const;
  const CostedSchedule& smallest() const;  // of the least peak
  const CostedSchedule& plain() const { return all_.front(); }

 private:
  void offer(Schedule schedule);

  std::vector<ChainProfile> here_, elsewhere_;
  std::vector<CostedSchedule> all_;
};

}  // namespace cairn::checkpointing
