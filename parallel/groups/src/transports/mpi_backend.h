// A mesh over MPI's messages.
#pragma once

#include "store/membership.h"
#include "transports/mesh.h"

namespace cairn::parallel {

/// Throws Unsupported in a build without MPI, CommunicationError where the ranks are not processes
/// of one mpirun.
std::unique_ptr<Mesh> connect_mpi(const Membership& membership);

/// "Open MPI v4.1.4"; "" in a build without.
std::string mpi_version();

}  // namespace cairn::parallel
