#include "collectives/cpu_backend.h"

#include <cstdlib>
#include <string>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "collectives/gloo_backend.h"
#include "collectives/mpi_backend.h"
#include "collectives/routed_mesh.h"
#include "collectives/shm/host.h"
#include "collectives/shm/shm_mesh.h"

namespace cairn::parallel {
namespace {

/// "": shared memory where ranks share a host, Gloo elsewhere.
std::string backend_variable() {
  const char* value = std::getenv("CAIRN_BACKEND");
  std::string backend = value == nullptr ? "" : value;
  CAIRN_CHECK(backend.empty() || backend == "shm" || backend == "gloo" || backend == "mpi", "group",
              "expected CAIRN_BACKEND to be shm, gloo or mpi, got '", backend, "'");
  return backend;
}

std::string agreed_backend(const Membership& membership) {
  std::string mine = backend_variable();
  const auto all = share(membership, "backend", mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    CAIRN_CHECK(all[rank] == all[0], "group", "expected one CAIRN_BACKEND for all ranks, got '",
                all[0], "' on rank 0 and '", all[rank], "' on rank ", rank);
  return mine;
}

std::unique_ptr<Mesh> connect(const Membership& membership) {
  const std::string backend = agreed_backend(membership);
  if (backend == "gloo") return connect_gloo(membership);
  if (backend == "mpi") return connect_mpi(membership);
  Host host = find_host(membership);
  if (host.is_whole_job) return std::make_unique<ShmMesh>(host.segment, membership.rank);
  if (backend == "shm")
    core::fail<core::Unsupported>("group", "CAIRN_BACKEND=shm expected all ranks on one host, got ",
                                  host.why_not);
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
