// What a path given on the command line stands for: one checkpoint, a folder of checkpoints, or a
// file or folder of weights (checkpointing/state_file.h).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::tools {

/// Finds the checkpoints of the path, newest first, or the one file or model that it is. Throws
/// core::DataError for a folder that holds none.
std::vector<std::string> stores_of(const std::string& path);

bool is_checkpoint(const std::string& store);

using Contents = std::vector<std::pair<std::string, StateDict::Value>>;
/// Reads and verifies every entry. Throws core::DataError or core::IoError, which name what is
/// wrong.
Contents read_contents(const std::string& store);

/// The entries that differ bit for bit, "name: how".
struct Differences {
  std::vector<std::string> lines;
  std::string first;       // name
  std::string largest_of;  // name of the tensor or number with the largest difference
  double largest = 0;
  std::size_t entries = 0;  // of both
};
Differences compare(const Contents& a, const Contents& b, const std::string& name_of_a,
                    const std::string& name_of_b);

/// Text from a file, safe to show on a terminal: control characters are escaped.
std::string printable(std::string_view text);
/// The same of each line of a message.
std::string printable_lines(std::string_view text);

}  // namespace cairn::tools
