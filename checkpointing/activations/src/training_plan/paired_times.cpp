#include "training_plan/paired_times.h"

#include <algorithm>
#include <cmath>

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kFewestRounds = 3;
constexpr double kBySheerLuck = 0.05;

// Other work only ever makes a run slower.
double quartile_of(std::vector<double> values) {
  const auto quarter = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 4);
  std::nth_element(values.begin(), quarter, values.end());
  return *quarter;
}

// That of n fair coins so many or more show heads.
double chance_of(std::size_t heads, std::size_t n) {
  double chance = 0, ways = 1;  // n over k
  for (std::size_t k = 0; k <= n; ++k) {
    if (k >= heads) chance += ways;
    ways = ways * static_cast<double>(n - k) / static_cast<double>(k + 1);
  }
  return chance / std::pow(2.0, static_cast<double>(n));
}

bool surely_slower(const std::vector<double>& times, const std::vector<double>& fastest) {
  std::size_t slower = 0;
  for (std::size_t i = 0; i < times.size(); ++i) slower += times[i] > fastest[i] ? 1 : 0;
  return chance_of(slower, times.size()) <= kBySheerLuck;
}

}  // namespace

std::vector<double> paired_times(const std::vector<std::function<double()>>& works) {
  std::vector<std::vector<double>> times(works.size());
  std::vector<double> quartiles(works.size());
  std::vector<std::size_t> open(works.size());
  for (std::size_t i = 0; i < works.size(); ++i) open[i] = i;
  for (std::size_t round = 1; round <= kMostRounds && open.size() > 1; ++round) {
    for (const std::size_t i : open) {
      times[i].push_back(works[i]());
      quartiles[i] = quartile_of(times[i]);
    }
    if (round < kFewestRounds) continue;
    const std::size_t fastest = *std::min_element(
        open.begin(), open.end(), [&](auto a, auto b) { return quartiles[a] < quartiles[b]; });
    std::erase_if(open, [&](std::size_t i) {
      return i != fastest && surely_slower(times[i], times[fastest]);
    });
  }
  if (works.size() == 1) quartiles[0] = works[0]();
  return quartiles;
}

}  // namespace cairn::checkpointing
