// How the ranks of a job agree on what a step ends and what overflowed: each says what it has and found in a few
// bytes, and all come to the same findings from what all said.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "cairn/amp/loss_scaler.h"
#include "cairn/amp/overflow.h"
#include "cairn/core/world.h"

namespace cairn::amp {

/// A loss that a step ends.
struct EndedLoss {
  double scale = 1.0;          // of its last backward
  bool check_delayed = false;  // by it
};

/// What one rank, or all together, found.
struct Findings {
  std::string refusal;             // why a rank cannot take its step; empty: all can
  std::map<int, EndedLoss> ended;  // by loss_id; of all: as the first rank that has it says
  std::map<int, std::vector<Culprit>> losses;  // that overflowed, by loss_id
  std::set<std::size_t> reached;               // optimizers, by the losses that end
  std::set<std::size_t> optimizers;            // whose gradients are not finite
  bool gradient = false;                       // any parameter has one
  std::string layer;  // the first one whose output was not finite, where that was looked for
};

/// A collective over `world`: every rank calls it in the same order. Ranks that found nothing in
/// their own gradients before the sum (World::take_local_nonfinite) are not accused.
Findings agree(const Findings& own, const World& world);

/// What became of the scale after an overflow: "loss scale 65536 -> 32768".
std::string scale_change(double before, const LossScaler& scaler);

}  // namespace cairn::amp
