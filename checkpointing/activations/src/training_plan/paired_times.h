// Which of several pieces of work is the fastest, on a machine that does other work, too.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace cairn::checkpointing {

/// Times them by turns, so that what else the machine does falls on all, until a sign test says of
/// each but the one with the least quartile that it is slower (one-sided, 5 %), and so leaves it
/// out, or kMostRounds were run. Each runs once and returns its seconds. Returns the lower
/// quartiles.
std::vector<double> paired_times(const std::vector<std::function<double()>>& works);

inline constexpr std::size_t kMostRounds = 15;

}  // namespace cairn::checkpointing
