// Builds without CUDA.
#include "backend.h"
#include "cairn/core/error.h"
#include "vendor_versions.h"

namespace cairn::kernels {

const Backend& cuda_backend() {
  core::fail<core::Unsupported>("cuda",
                                "this build of Cairn has no CUDA backend (configure with "
                                "-DCAIRN_CUDA=ON where a CUDA toolkit is installed)");
}

core::LibraryVersions cuda_versions() {
  return {};
}

}  // namespace cairn::kernels
