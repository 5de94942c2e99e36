// Which libraries compute.
#pragma once

#include "cairn/core/version.h"

namespace cairn::kernels {

/// oneDNN's version and, in a build with CUDA, cuBLASLt's and cuDNN's.
core::LibraryVersions library_versions();

}  // namespace cairn::kernels
