#include "store/descriptors.h"

#include <sys/resource.h>

#include <filesystem>
#include <iterator>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

constexpr rlim_t kLeast = 20;  // of a rank without peers: ZeroMQ's own

rlim_t open_files(rlim_t otherwise) {
  std::error_code error;  // none is left to count the others by
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  return error ? otherwise : static_cast<rlim_t>(std::distance(begin(files), end(files)));
}

}  // namespace

void make_room_for_connections(int ranks) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t needed = open_files(0) + kLeast + static_cast<rlim_t>(ranks);
  if (needed <= limit.rlim_max) return;
  core::fail<core::Unsupported>("from_environment", "expected a hard limit of ", needed,
                                " open files or more for connections with ", ranks, " ranks, got ",
                                limit.rlim_max, " (raise RLIMIT_NOFILE, ulimit -Hn)");
}

std::string descriptor_hint() {
  constexpr rlim_t kMargin = 8;  // what failed may have closed some already
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return "";
  const rlim_t open = open_files(limit.rlim_cur);
  if (open + kMargin < limit.rlim_cur) return "";
  return core::str(" (this process has ", open, " files open and may have ", limit.rlim_cur,
                   ": raise RLIMIT_NOFILE, ulimit -n)");
}

}  // namespace cairn::parallel
