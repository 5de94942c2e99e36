#pragma once

#include "cairn/core/version.h"

namespace cairn::kernels {

/// Of the CUDA backend's libraries; none in a build without.
core::LibraryVersions cuda_versions();

}  // namespace cairn::kernels
