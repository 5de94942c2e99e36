// What the ranks of a job tell each other in a step, once: which losses it ends, what overflowed,
// errors.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cairn/amp/loss_scaler.h"
#include "cairn/amp/overflow.h"
#include "cairn/core/world.h"

namespace cairn::amp {

/// What one rank found, or all together.
struct StepReport {
  std::string losses_ended;                       // for people; the same on every rank
  std::map<int, std::vector<Culprit>> overflows;  // by loss_id
  std::set<std::size_t> overflowed;               // of losses_ended, by place
  std::set<std::size_t> optimizers;               // whose gradients are not finite
  std::string layer;  // the first one whose output was not finite, where that was looked for
};

/// What all ranks found, each by `find`. A collective over `world`. Ranks that found nothing in
/// their own gradients before the sum (World::take_local_nonfinite) are not accused. Where `find`
/// throws on one rank, all throw (World::all_or_throw); where ranks end other losses, all throw
/// InvalidArgument.
StepReport agree(const std::function<StepReport()>& find, const World& world);

std::vector<std::string> parameters_of(const std::vector<Culprit>& culprits);

/// What became of the scale after an overflow: "loss scale 65536 -> 32768".
std::string scale_change(double before, const LossScaler& scaler);

}  // namespace cairn::amp
