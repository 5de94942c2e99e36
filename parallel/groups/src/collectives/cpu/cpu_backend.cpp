#include "collectives/cpu/cpu_backend.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "collectives/cpu/mesh_collectives.h"
#include "transports/gloo_backend.h"
#include "transports/mpi_backend.h"
#include "transports/routed_mesh.h"
#include "transports/shm/host.h"
#include "transports/shm/shm_mesh.h"

namespace cairn::parallel {
namespace {

/// Why the ranks' values of CAIRN_BACKEND are no choice; empty: they are.
std::string objection(const std::vector<std::string>& values) {
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    const std::string& value = values[rank];
    if (!value.empty() && value != "shm" && value != "gloo" && value != "mpi")
      return core::str("expected CAIRN_BACKEND to be shm, gloo or mpi, got '", value, "' on rank ",
                       rank);
    if (value != values[0])
      return core::str("expected one CAIRN_BACKEND for all ranks, got '", values[0],
                       "' on rank 0 and '", value, "' on rank ", rank);
  }
  return "";
}

/// Throws what every rank has found: none breaks the job before all know, so it is the same error
/// everywhere.
template <class E>
[[noreturn]] void fail_together(const Membership& membership, const std::string& why) {
  try {
    share(membership, "backend/judged", "");
  } catch (const core::CommunicationError&) {  // somebody has thrown: all knew
  }
  core::fail<E>("group", why);
}

/// "": shared memory where ranks share a host, Gloo elsewhere. Every rank judges all values.
std::string agreed_backend(const Membership& membership) {
  const char* mine = std::getenv("CAIRN_BACKEND");
  const auto all = share(membership, "backend", mine == nullptr ? "" : mine);
  const std::string why = objection(all);
  if (!why.empty()) fail_together<core::InvalidArgument>(membership, why);
  return all[0];
}

std::unique_ptr<Mesh> connect(const Membership& membership) {
  const std::string backend = agreed_backend(membership);
  if (backend == "gloo") return connect_gloo(membership);
  if (backend == "mpi") return connect_mpi(membership);
  Host host = find_host(membership);
  if (host.is_whole_job) return std::make_unique<ShmMesh>(host.segment, membership.rank);
  if (backend == "shm")
    fail_together<core::Unsupported>(
        membership, "CAIRN_BACKEND=shm expected all ranks on one host, got " + host.why_not);
  log::debug("CPU tensors between hosts go over Gloo: {}", host.why_not);
  auto network = connect_gloo(membership);
  if (!host.segment) return network;
  const int place = host.places[static_cast<std::size_t>(membership.rank)];
  return std::make_unique<RoutedMesh>(std::make_unique<ShmMesh>(host.segment, place),
                                      std::move(host.places), std::move(network));
}

}  // namespace

std::unique_ptr<Collectives> connect_cpu(const Membership& membership) {
  return make_mesh_collectives(connect(membership));
}

}  // namespace cairn::parallel
