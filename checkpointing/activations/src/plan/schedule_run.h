// Schedules of blocks, carried out and written down.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cairn/checkpointing/planner.h"

namespace cairn::nn {
class Sequential;
}

namespace cairn::checkpointing {

/// The blocks one after another. What a replay needs of the arguments is kept until then.
Tensor run_schedule(const std::vector<Segment>& blocks, const Schedule& schedule,
                    const std::shared_ptr<Offload>& offload, const Tensor& x);

/// As RecomputationPlan::report() has it.
std::string schedule_text(const Schedule& schedule);

/// The modules as functions; they must live as long.
std::vector<Segment> modules_of(nn::Sequential& model);

}  // namespace cairn::checkpointing
