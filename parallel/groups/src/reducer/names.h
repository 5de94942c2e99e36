// Lists of names, in errors and between ranks.
#pragma once

#include <string>
#include <vector>

namespace cairn::parallel {

/// "'a', 'b' and 12 more".
std::string join_names(const std::vector<std::string>& names);
std::vector<std::string> lines_of(const std::string& text);
bool all_equal(const std::vector<std::string>& texts);

}  // namespace cairn::parallel
