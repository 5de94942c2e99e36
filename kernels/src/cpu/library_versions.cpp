#include "cairn/kernels/versions.h"

#include <oneapi/dnnl/dnnl.hpp>

#include "cairn/core/error.h"
#include "vendor_versions.h"

namespace cairn::kernels {

core::LibraryVersions library_versions() {
  const dnnl_version_t* dnnl = dnnl::version();
  core::LibraryVersions versions = {
      {"oneDNN", core::str(dnnl->major, ".", dnnl->minor, ".", dnnl->patch)}};
  for (auto& version : cuda_versions()) versions.push_back(std::move(version));
  return versions;
}

}  // namespace cairn::kernels
