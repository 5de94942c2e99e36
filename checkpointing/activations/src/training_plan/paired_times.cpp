#include "training_plan/paired_times.h"

#include <algorithm>
#include <cmath>

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kFewestRounds = 3;
constexpr double kBySheerLuck = 0.05;

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
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
  std::vector<double> medians(works.size());
  std::vector<std::size_t> open(works.size());
  for (std::size_t i = 0; i < works.size(); ++i) open[i] = i;
  for (std::size_t round = 1; round <= kMostRounds && open.size() > 1; ++round) {
    for (const std::size_t i : open) {
      times[i].push_back(works[i]());
      medians[i] = median_of(times[i]);
    }
    if (round < kFewestRounds) continue;
    const std::size_t fastest = *std::min_element(
        open.begin(), open.end(), [&](auto a, auto b) { return medians[a] < medians[b]; });
    std::erase_if(open, [&](std::size_t i) {
      return i != fastest && surely_slower(times[i], times[fastest]);
    });
  }
  if (works.size() == 1) medians[0] = works[0]();
  return medians;
}

}  // namespace cairn::checkpointing
