// Cairn's version, and those of the libraries that this process computes with.
//
// Semantic versioning: while MAJOR is 0 a new MINOR may break programs, a new PATCH never does.
// Libraries of the same MAJOR.MINOR replace each other (it is their SONAME). CMake reads the
// numbers from here.
#pragma once

#include <string>
#include <utility>
#include <vector>

#define CAIRN_VERSION_MAJOR 0
#define CAIRN_VERSION_MINOR 1
#define CAIRN_VERSION_PATCH 0

#define CAIRN_VERSION_TEXT_(major, minor, patch) #major "." #minor "." #patch
#define CAIRN_VERSION_TEXT(major, minor, patch) CAIRN_VERSION_TEXT_(major, minor, patch)
/// "0.1.0": of the headers that a program is compiled with.
#define CAIRN_VERSION \
  CAIRN_VERSION_TEXT(CAIRN_VERSION_MAJOR, CAIRN_VERSION_MINOR, CAIRN_VERSION_PATCH)

namespace cairn::core {

/// CAIRN_VERSION of the library that the program runs with.
const char* version() noexcept;

/// {"compiler", "GCC 12.2.0"}, {"CUDA", "13.0"} ...
using LibraryVersions = std::vector<std::pair<std::string, std::string>>;

/// Core's: the compiler and, where there are, CUDA's runtime and driver.
/// kernels::library_versions() and World::libraries() tell theirs.
LibraryVersions library_versions();

}  // namespace cairn::core
