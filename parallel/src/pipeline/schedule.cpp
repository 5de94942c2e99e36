#include "pipeline/schedule.h"

#include <algorithm>

namespace cairn::parallel {
std::vector<PipelineTask> stage_tasks(int stage, int stages, int micro_batches,
                                      PipelineSchedule schedule) {
  const bool gpipe = schedule == PipelineSchedule::gpipe;
  const int ahead = gpipe ? micro_batches : std::min(stages - stage, micro_batches);
  std::vector<PipelineTask> tasks;
  tasks.reserve(2 * static_cast<std::size_t>(micro_batches));
  for (int m = 0; m < ahead; ++m) tasks.push_back({stage, m, false});
  for (int m = 0; m < micro_batches; ++m) {
    tasks.push_back({stage, m, true});
    if (m + ahead < micro_batches) tasks.push_back({stage, m + ahead, false});
  }
  return tasks;
}

namespace {

/// How many micro-batches each stage has done.
struct Progress {
  std::vector<int> forwards, backwards;

  bool allows(const PipelineTask& task) const {
    const auto stage = static_cast<std::size_t>(task.stage);
    if (!task.backward) return stage == 0 || forwards[stage - 1] > task.micro_batch;
    if (forwards[stage] <= task.micro_batch) return false;
    return stage + 1 == forwards.size() || backwards[stage + 1] > task.micro_batch;
  }
  void add(const PipelineTask& task) {
    ++(task.backward ? backwards : forwards)[static_cast<std::size_t>(task.stage)];
  }
};

}  // namespace

PipelinePlan plan_pipeline(int stages, int micro_batches, PipelineSchedule schedule) {
  const auto count = static_cast<std::size_t>(stages);
  std::vector<std::vector<PipelineTask>> waiting;
  waiting.reserve(count);
  for (int s = 0; s < stages; ++s) {
    waiting.push_back(stage_tasks(s, stages, micro_batches, schedule));
  }
  std::vector<std::size_t> next(count, 0);
  Progress progress{std::vector<int>(count, 0), std::vector<int>(count, 0)};
  PipelinePlan plan;
  for (int left = 2 * stages * micro_batches; left > 0;) {
    std::vector<PipelineTask> slot;
    for (std::size_t s = 0; s < count; ++s) {
      if (next[s] == waiting[s].size() || !progress.allows(waiting[s][next[s]])) continue;
      slot.push_back(waiting[s][next[s]++]);
    }
    for (const PipelineTask& task : slot) progress.add(task);
    left -= static_cast<int>(slot.size());
    plan.push_back(std::move(slot));
  }
  return plan;
}

PipelineReport report_of(const PipelinePlan& plan, int stages, int micro_batches) {
  PipelineReport report;
  report.micro_batches = micro_batches;
  report.slots = static_cast<int>(plan.size());
  const int busy = 2 * micro_batches * stages, all = report.slots * stages;
  report.bubble = static_cast<double>(all - busy) / static_cast<double>(all);
  std::vector<int> in_flight(static_cast<std::size_t>(stages), 0);
  report.most_in_flight = in_flight;
  for (const std::vector<PipelineTask>& slot : plan) {
    for (const PipelineTask& task : slot) {
      const auto stage = static_cast<std::size_t>(task.stage);
      in_flight[stage] += task.backward ? -1 : 1;
      report.most_in_flight[stage] = std::max(report.most_in_flight[stage], in_flight[stage]);
    }
  }
  return report;
}

}  // namespace cairn::parallel
