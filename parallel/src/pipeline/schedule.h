// Which stage of a pipeline does what in which slot.
#pragma once

#include <vector>

#include "cairn/parallel/pipeline.h"

namespace cairn::parallel {

struct PipelineTask {
  int stage, micro_batch;
  bool backward;
};

/// What one stage does, in its order.
std::vector<PipelineTask> stage_tasks(int stage, int stages, int micro_batches,
                                      PipelineSchedule schedule);

/// All tasks, slot by slot: those of one slot are independent, and each needs only tasks of earlier
/// slots.
using PipelinePlan = std::vector<std::vector<PipelineTask>>;
PipelinePlan plan_pipeline(int stages, int micro_batches, PipelineSchedule schedule);

PipelineReport report_of(const PipelinePlan& plan, int stages, int micro_batches);

}  // namespace cairn::parallel
