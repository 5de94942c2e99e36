#include "plan/schedule_choice.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "plan/merged_chain.h"

namespace cairn::checkpointing {

namespace {

SchedulePart recomputed_segment(std::size_t begin, std::size_t end) {
  SchedulePart part{begin, end};
  for (std::size_t i = begin; i < end; ++i) part.inner.push_back({i, i + 1});
  return part;
}

Schedule halves(std::size_t begin, std::size_t end) {
  Schedule schedule;
  for (; end - begin > 1; begin += (end - begin) / 2) {
    const std::size_t middle = begin + (end - begin) / 2;
    schedule.push_back({begin, middle, halves(begin, middle)});
  }
  schedule.push_back({begin, end});
  return schedule;
}

Schedule segments_of(std::size_t n, std::size_t length) {
  Schedule schedule;
  std::size_t i = 0;
  for (; i + length < n; i += length) schedule.push_back(recomputed_segment(i, i + length));
  for (; i < n; ++i) schedule.push_back({i, i + 1});
  return schedule;
}

Schedule first_recomputed(std::size_t n, std::size_t count) {
  Schedule schedule;
  for (std::size_t i = 0; i < n; ++i) {
    schedule.push_back(i < count ? recomputed_segment(i, i + 1) : SchedulePart{i, i + 1});
  }
  return schedule;
}

bool alike(const ScheduleCost& a, const ScheduleCost& b) {
  return a.peak == b.peak && a.seconds == b.seconds;
}

}  // namespace

ScheduleChoice::ScheduleChoice(const std::vector<BlockProfile>& profile, std::size_t slots) {
  const std::size_t n = profile.size();
  offer(profile, plain_schedule(n));
  offer(profile, halves(0, n));
  for (std::size_t k = 1; k < n; ++k) {
    offer(profile, segments_of(n, k));
    offer(profile, first_recomputed(n, k));
  }
  // The programme is more careful than the simulation, so the amount it counts with is only a
  // guide.
  const MergedChain merged(profile, ChainProgramme::kMostBlocks);
  const ChainProgramme programme(merged.blocks(), slots);
  for (std::size_t m = 0; m <= programme.steps(); ++m) {
    if (const std::optional<Schedule> schedule = programme.schedule(m)) {
      offer(profile, merged.expanded(*schedule));
    }
  }
}

void ScheduleChoice::offer(const std::vector<BlockProfile>& profile, Schedule schedule) {
  const ScheduleCost cost = simulate(profile, schedule);
  if (!all_.empty() && alike(all_.back().cost, cost)) return;
  all_.push_back({std::move(schedule), cost});
}

const CostedSchedule* ScheduleChoice::fastest(std::size_t room) const {
  const CostedSchedule* best = nullptr;
  for (const CostedSchedule& one : all_) {
    if (one.cost.peak > room) continue;
    if (best == nullptr || one.cost.seconds < best->cost.seconds) best = &one;
  }
  return best;
}

const CostedSchedule& ScheduleChoice::smallest() const {
  return *std::min_element(all_.begin(), all_.end(),
                           [](const auto& a, const auto& b) { return a.cost.peak < b.cost.peak; });
}

}  // namespace cairn::checkpointing
