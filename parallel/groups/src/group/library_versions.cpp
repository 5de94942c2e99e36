#include "group/library_versions.h"

#include "collectives/nccl_backend.h"
#include "transports/gloo_backend.h"
#include "transports/mpi_backend.h"

namespace cairn::parallel {

core::LibraryVersions library_versions() {
  core::LibraryVersions versions = {
      {"NCCL", nccl_version()}, {"Gloo", gloo_version()}, {"MPI", mpi_version()}};
  std::erase_if(versions, [](const auto& version) { return version.second.empty(); });
  return versions;
}

}  // namespace cairn::parallel
