// Lists that must be the same on every rank, one line an entry.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cairn::parallel {

/// 32 bytes that stand for the text: the ranks' are the same where their texts are.
std::string digest(std::string_view text);
std::vector<std::string> lines_of(const std::string& text);
bool all_equal(const std::vector<std::string>& texts);

/// Throws InvalidArgument that names the first line in which rank 0's list and another's differ, if
/// any. `where` and `what` ("model"): "[where] expected the same what on every rank, got ...".
void check_same_lists(std::string_view where, std::string_view what,
                      const std::vector<std::string>& of_rank);

}  // namespace cairn::parallel
