// Names in errors, and what collectives are called.
#pragma once

#include <string>
#include <vector>

namespace cairn::parallel {

/// "'a', 'b' and 12 more".
std::string join_names(const std::vector<std::string>& names);
/// "loss 1 scaled by 8: gradients a ... b": what a collective of a backward is called, so that
/// those of other losses differ; the name alone where nobody says of which losses it is.
std::string of_losses(const std::string& losses, const std::string& name);

}  // namespace cairn::parallel
