// What ranks tell each other of their gradients ahead of a reduction: in a backward that tells what
// its loss reaches, and in a step that reduces.
#pragma once

#include <string>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::parallel {

struct HeldGradients {
  std::string losses;      // describe_held_losses()
  bool f32_slots = false;  // of the arena: a rank with nothing to add to may be behind
  std::vector<bool> bits;  // what the two collectives tell of each parameter

  std::string pack() const;
};

/// What each rank has packed. Throws InvalidArgument where losses differ, with two that do.
std::vector<HeldGradients> unpack(const std::vector<std::string>& of_rank);
bool any_has_f32_slots(const std::vector<HeldGradients>& ranks);

/// Whether anything is left of what backwards before the one that has begun reduced.
bool holds_reduced_of_before(const NamedTensors& parameters);
/// "loss 1 scaled by 8, sums of loss 0 scaled by 16"; "none". Frozen parameters are left out.
std::string describe_held_losses(const NamedTensors& parameters);
/// The same; empty where all is of plain backwards.
std::string known_losses(const NamedTensors& parameters);

}  // namespace cairn::parallel
