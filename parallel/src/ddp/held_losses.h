// Of which losses the gradients are that a rank holds, at which scale: what ranks compare.
#pragma once

#include <string>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::parallel {

/// "loss 1 scaled by 8, sums of loss 0 scaled by 16"; "none". tells_reduced: also what of it is
/// reduced over the ranks. Frozen parameters are left out.
std::string describe_held_losses(const NamedTensors& parameters, bool tells_reduced);

/// Throws InvalidArgument where the ranks' descriptions differ, with two that do.
void check_same_losses(const std::vector<std::string>& of_rank);

}  // namespace cairn::parallel
