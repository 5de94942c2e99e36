#include "clocks.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace cairn::observe {

ClockMarks mark_rounds(const World& world, std::string_view name,
                       const std::function<double()>& now) {
  ClockMarks marks;
  for (int round = 0; round < kClockRounds; ++round) {
    marks.came.push_back(now());
    world.exchange("", name);
    marks.left.push_back(now());
  }
  return marks;
}

ClockOffset offset_to(const ClockMarks& reference, const ClockMarks& other) {
  double least = -std::numeric_limits<double>::infinity(), most = -least;
  for (std::size_t i = 0; i < reference.came.size(); ++i) {
    least = std::max(least, reference.came[i] - other.left[i]);
    most = std::min(most, reference.left[i] - other.came[i]);
  }
  return {(least + most) / 2, (most - least) / 2};
}

}  // namespace cairn::observe
