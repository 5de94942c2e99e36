#include "transports/shm/host.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "cairn/core/error.h"
#include "cairn/core/log.h"

namespace cairn::parallel {
namespace {

std::string link_target(const char* path) {
  std::array<char, 128> target{};
  const ssize_t length = readlink(path, target.data(), target.size());
  return length > 0 ? std::string(target.data(), static_cast<std::size_t>(length)) : "?";
}

}  // namespace

std::string host_identity(int rank) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pid = link_target("/proc/self/ns/pid"), net = link_target("/proc/self/ns/net"),
                    user = link_target("/proc/self/ns/user");
  const bool known = !boot.empty() && pid != "?" && net != "?" && user != "?";
  return known ? core::str(boot, " ", pid, " ", net, " ", user, " ", geteuid())
               : core::str("unknown host of rank ", rank);
}

namespace {

/// The ranks of this rank's host, in order.
std::vector<std::size_t> ranks_like(const std::vector<std::string>& hosts, std::size_t rank) {
  std::vector<std::size_t> ranks;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] == hosts[rank]) ranks.push_back(r);
  }
  return ranks;
}

/// f() or the message of its error.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
    return "";
  } catch (const core::Error& error) {
    return error.what();
  }
}

}  // namespace

Host find_host(const Membership& membership) {
  const auto me = static_cast<std::size_t>(membership.rank);
  const auto hosts = share(membership, "hosts", host_identity(membership.rank));
  const std::vector<std::size_t> ranks = ranks_like(hosts, me);
  const bool alone = ranks.size() == 1, first = ranks.front() == me;
  Host host;
  std::string error, address;
  if (first && !alone) {
    error = error_of([&] {
      host.segment = ShmSegment::create(static_cast<int>(ranks.size()));
      address = host.segment->address();
    });
  }
  const auto addresses = share(membership, "segments", address);
  if (!first) error = error_of([&] { host.segment = ShmSegment::open(addresses[ranks.front()]); });
  const auto errors = share(membership, "opened", error);
  if (first && host.segment) host.segment->close_file();
  host.is_whole_job = ranks.size() == hosts.size();
  if (!host.is_whole_job) host.why_not = "ranks on several hosts";
  host.places.assign(hosts.size(), -1);
  bool usable = !alone;
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    host.places[ranks[place]] = static_cast<int>(place);
    if (errors[ranks[place]].empty()) continue;
    host.why_not = core::str("rank ", ranks[place], ": ", errors[ranks[place]]);
    usable = false;
  }
  if (usable) return host;
  if (!alone) log::debug("no shared memory between the processes of this host: {}", host.why_not);
  return {nullptr, std::vector<int>(hosts.size(), -1), false, host.why_not};
}

}  // namespace cairn::parallel
