// What a path given on the command line stands for: one checkpoint, a folder of checkpoints, or a
// safetensors file.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::tools {

/// Finds the checkpoints of the path, newest first, or its one file. Throws core::DataError for a
/// folder that holds none.
std::vector<std::string> stores_of(const std::string& path);

bool is_file(const std::string& path);

using Contents = std::vector<std::pair<std::string, StateDict::Value>>;
/// Reads and verifies every entry. Throws core::DataError or core::IoError, which name what is
/// wrong.
Contents read_contents(const std::string& store);

/// Text from a file, safe to show on a terminal: control characters are escaped.
std::string printable(std::string_view text);

}  // namespace cairn::tools
