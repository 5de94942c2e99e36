// Which ranks share this host's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "store/membership.h"
#include "transports/shm/segment.h"

namespace cairn::parallel {

struct Host {
  std::shared_ptr<ShmSegment> segment;  // null: this rank shares with nobody
  std::vector<int> places;              // each rank's place in the segment, -1 without
  bool is_whole_job = false;            // on all ranks alike
  std::string why_not;                  // where it is not
};

/// What ranks that can share memory have in common. Where it cannot be told, nobody has the same.
std::string host_identity(int rank);

/// A collective of all ranks, through the store. Ranks share memory where they run under one boot
/// of one kernel as one user in the same namespaces of processes, users and the network, and can
/// open it. Where a rank of a host cannot, that host's ranks do without.
Host find_host(const Membership& membership);

}  // namespace cairn::parallel
