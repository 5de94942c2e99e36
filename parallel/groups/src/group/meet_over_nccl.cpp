#include "group/meet_over_nccl.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "collectives/nccl_backend.h"
#include "transports/shm/host.h"

namespace cairn::parallel {
namespace {

std::string random_token() {
  std::random_device source;
  std::string token;
  for (int i = 0; i < 8; ++i) {
    std::array<char, 9> digits{};
    std::snprintf(digits.data(), digits.size(), "%08x", source());
    token += digits.data();
  }
  return token;
}

/// As the other ranks know it.
std::string own_address(bool one_machine) {
  const char* given = std::getenv("MASTER_ADDR");
  if (given != nullptr && *given != '\0') return given;
  if (one_machine) return "127.0.0.1";
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// Rank 0's part: "port token address", or "- " and why there is none.
std::string serve(Meeting& meeting, bool one_machine) {
  try {
    StoreAddress address{own_address(one_machine), 0, random_token()};
    meeting.server = std::make_unique<StoreServer>(address, meeting.job.world_size);
    return core::str(meeting.server->port(), " ", address.token, " ", address.host);
  } catch (const core::Error& error) {
    return core::str("- ", std::string(error.what()).substr(0, 200));
  }
}

}  // namespace

Meeting meet_over_nccl(ncclComm* communicator, std::chrono::milliseconds timeout) {
  const NcclPlace place = place_in(communicator);
  Meeting meeting;
  JobEnvironment& job = meeting.job;
  job.rank = place.rank;
  job.world_size = place.ranks;
  job.gpu = place.device.index;
  if (place.ranks == 1) return meeting;

  const std::vector<std::string> hosts =
      exchange_over(communicator, host_identity(place.rank), timeout);
  const auto own = hosts.begin() + place.rank;
  job.local_rank = static_cast<int>(std::count(hosts.begin(), own, *own));
  job.local_world_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), *own));

  const bool one_machine = job.local_world_size == job.world_size;
  const std::string told = place.rank == 0 ? serve(meeting, one_machine) : "";
  const std::string first = exchange_over(communicator, told, timeout).front();
  if (first.starts_with("- "))
    core::fail<core::CommunicationError>("from_nccl", "rank 0 cannot listen: ", first.substr(2));
  std::istringstream(first) >> job.master_port >> job.token >> job.master_addr;
  return meeting;
}

}  // namespace cairn::parallel
