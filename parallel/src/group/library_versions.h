#pragma once

#include "cairn/core/versions.h"

namespace cairn::parallel {

/// Of the libraries that this build can reach other ranks with.
core::LibraryVersions library_versions();

}  // namespace cairn::parallel
