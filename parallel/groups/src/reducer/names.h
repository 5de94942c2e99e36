// Lists of names, in errors and between ranks.
#pragma once

#include <string>
#include <vector>

namespace cairn::parallel {

/// "'a', 'b' and 12 more".
std::string join_names(const std::vector<std::string>& names);
std::vector<std::string> lines_of(const std::string& text);
/// "loss 1 scaled by 8: gradients a ... b": what a collective of a backward is called, so that those
/// of other losses differ; the name alone where nobody says of which loss it is.
std::string of_loss(const std::string& loss, const std::string& name);
bool all_equal(const std::vector<std::string>& texts);

}  // namespace cairn::parallel
