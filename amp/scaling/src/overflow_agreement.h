// What the ranks of a job tell each other in a step, once: which losses it ends, what overflowed,
// errors. And how it is told to people.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cairn/amp/loss_scaler.h"
#include "cairn/amp/overflow.h"
#include "cairn/core/world.h"

namespace cairn::amp {

using Overflows = std::map<int, std::vector<Culprit>>;  // by loss_id

/// What one rank found, or all together.
struct StepReport {
  std::string losses_ended;      // for people; the same on every rank
  std::string layer;             // the first whose output was not finite, where that was looked for
  std::vector<bool> overflowed;  // of losses_ended, by place
  std::vector<bool> optimizers;  // whose gradients are not finite
  bool in_parts = false;         // ranks divide gradients: overflows are those of this one's parts
  Overflows overflows;           // in what the optimizers have: an average, or a part of one
  std::optional<std::vector<Culprit>> before_sum;  // of this rank's own; agree() asks for it
};

/// What all ranks found, each by `find`. A collective over `world`. Ranks that found nothing in
/// their own gradients before the sum (World::take_local_nonfinite) are not accused. Where `find`
/// throws on one rank, all throw (World::all_or_throw); where ranks end other losses, all throw
/// InvalidArgument.
StepReport agree(const std::function<StepReport()>& find, const World& world);

/// Whole numbers in full ("16777216"), others as streams print them.
std::string number(double value);

std::vector<std::string> parameters_of(const std::vector<Culprit>& culprits);

/// What became of the scale after an overflow: "loss scale 65536 -> 32768".
std::string scale_change(double before, const LossScaler& scaler);

}  // namespace cairn::amp
