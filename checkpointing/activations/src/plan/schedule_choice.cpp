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

std::size_t largest_peak(const std::vector<ChainProfile>& profiles, const Schedule& schedule,
                         const ChainBeside& beside = {}) {
  std::size_t largest = 0;
  for (const ChainProfile& profile : profiles)
    largest = std::max(largest, simulate(profile, schedule, beside).peak);
  return largest;
}

bool alike(const ScheduleCost& a, const ScheduleCost& b) {
  return a.peak == b.peak && a.seconds == b.seconds;
}

}  // namespace

ScheduleChoice::ScheduleChoice(const std::vector<ChainProfile>& here, std::size_t slots,
                               const std::vector<ChainProfile>& elsewhere)
    : here_(here), elsewhere_(elsewhere) {
  const ChainProfile& profile = here_.front();
  const std::size_t n = profile.size();
  offer(plain_schedule(n));
  offer(halves(0, n));
  for (std::size_t k = 1; k < n; ++k) {
    offer(segments_of(n, k));
    offer(first_recomputed(n, k));
  }
  // The programme is more careful than the simulation, so the amount it counts with is only a
  // guide.
  const MergedChain merged(profile, ChainProgramme::kMostBlocks);
  const ChainProgramme programme(merged.blocks(), slots);
  for (std::size_t m = 0; m <= programme.steps(); ++m) {
    if (const std::optional<Schedule> schedule = programme.schedule(m)) {
      offer(merged.expanded(*schedule));
    }
  }
}

void ScheduleChoice::offer(Schedule schedule) {
  ScheduleCost cost = simulate(here_.front(), schedule);
  cost.peak = largest_peak(here_, schedule);
  if (!all_.empty() && alike(all_.back().cost, cost)) return;
  const std::size_t elsewhere = largest_peak(elsewhere_, schedule);
  all_.push_back({std::move(schedule), cost, elsewhere});
}

ScheduleChoice ScheduleChoice::with(const ChainBeside& beside) const {
  ScheduleChoice other = *this;
  if (beside.blocks.empty()) return other;
  for (CostedSchedule& one : other.all_) one.cost.peak = largest_peak(here_, one.schedule, beside);
  return other;
}

const CostedSchedule* ScheduleChoice::fastest(std::size_t room, std::size_t room_elsewhere) const {
  const CostedSchedule* best = nullptr;
  for (const CostedSchedule& one : all_) {
    if (one.cost.peak > room || one.peak_elsewhere > room_elsewhere) continue;
    if (best == nullptr || one.cost.seconds < best->cost.seconds) best = &one;
  }
  return best;
}

const CostedSchedule& ScheduleChoice::smallest() const {
  return *std::min_element(all_.begin(), all_.end(),
                           [](const auto& a, const auto& b) { return a.cost.peak < b.cost.peak; });
}

}  // namespace cairn::checkpointing
