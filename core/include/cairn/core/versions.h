// Which libraries this process computes with, for state files and reports of errors.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace cairn::core {

/// {"compiler", "GCC 12.2.0"}, {"CUDA", "13.0"} ...
using LibraryVersions = std::vector<std::pair<std::string, std::string>>;

/// Core's: the compiler and, where there are, CUDA's runtime and driver. kernels::library_versions()
/// and World::libraries() tell theirs.
LibraryVersions library_versions();

}  // namespace cairn::core
