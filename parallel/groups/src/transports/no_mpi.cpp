#include "cairn/core/error.h"
#include "transports/mpi_backend.h"

namespace cairn::parallel {

std::unique_ptr<Mesh> connect_mpi(const Membership& /*membership*/) {
  core::fail<core::Unsupported>("group",
                                "this build has no MPI, which CAIRN_BACKEND=mpi asks for "
                                "(apt-get install libopenmpi-dev, configure and build again)");
}

std::string mpi_version() {
  return "";
}

}  // namespace cairn::parallel
