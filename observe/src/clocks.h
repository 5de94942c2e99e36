// How far apart the clocks of ranks are. Nobody leaves an exchange before all have come, so each
// rank's leaving lies after every other's coming: each round bounds the offset of two clocks from
// both sides, by as much as it took. The bounds of all rounds together are at least as close as
// those of the shortest.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "cairn/core/world.h"

namespace cairn::observe {

/// When a rank came to each round and left it, in seconds of its own clock.
struct ClockMarks {
  std::vector<double> came, left;
};

/// A collective: kClockRounds exchanges.
ClockMarks mark_rounds(const World& world, std::string_view name,
                       const std::function<double()>& now);
inline constexpr int kClockRounds = 32;

struct ClockOffset {
  double seconds = 0;  // to be added to the other's times
  double error = 0;    // at most
};
ClockOffset offset_to(const ClockMarks& reference, const ClockMarks& other);

}  // namespace cairn::observe
