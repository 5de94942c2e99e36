#pragma once

#include "cairn/core/version.h"

namespace cairn::parallel {

/// Of the libraries that this build can reach other ranks with.
core::LibraryVersions library_versions();

}  // namespace cairn::parallel
