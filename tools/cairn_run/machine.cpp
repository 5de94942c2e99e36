#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::run {
namespace {

namespace fs = std::filesystem;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// Cores that this process may run on, by number. Empty where the machine has more than a cpu_set_t
/// can tell.
std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

/// Version 2, "QUOTA PERIOD" in microseconds; QUOTA is "max" where there is no limit.
double limit_v2(const fs::path& folder) {
  std::ifstream file(folder / "cpu.max");
  double quota = 0;
  double period = 0;
  return file >> quota >> period && period > 0 ? quota / period : kUnlimited;
}

/// Version 1; the quota is -1 where there is no limit.
double limit_v1(const fs::path& folder) {
  std::ifstream quota_file(folder / "cpu.cfs_quota_us");
  std::ifstream period_file(folder / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  return quota_file >> quota && period_file >> period && quota > 0 && period > 0 ? quota / period
                                                                                 : kUnlimited;
}

/// The smallest limit of a group and all groups above it. In a container the group's path may be
/// the host's, of which only the top is to be seen.
double smallest_limit(const fs::path& top, const std::string& group,
                      const std::function<double(const fs::path&)>& limit) {
  double smallest = limit(top);
  fs::path folder = top;
  for (const fs::path& part : fs::path(group).relative_path()) {
    folder /= part;
    smallest = std::min(smallest, limit(folder));
  }
  return smallest;
}

/// Whether a comma-separated list has the word.
bool lists(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

/// Whether `name` is `prefix` and a number.
bool is_numbered(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix) || name.size() == prefix.size()) return false;
  name.remove_prefix(prefix.size());
  return std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

int count_numbered(const fs::path& folder, std::string_view prefix,
                   const std::function<bool(const fs::path&)>& counts) {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    count += is_numbered(entry.path().filename().string(), prefix) && counts(entry.path());
  }
  return count;
}

/// CUDA takes the entries up to the first that is no GPU: "-1", or nothing at all.
int listed_gpus(const std::string& list) {
  std::istringstream entries(list);
  std::string entry;
  int count = 0;
  while (std::getline(entries, entry, ',')) {
    const std::size_t first = entry.find_first_not_of(' ');
    if (first == std::string::npos || entry[first] == '-' || entry == "NoDevFiles") break;
    ++count;
  }
  return count;
}

}  // namespace

/// Lines of /proc/self/cgroup read "number:controllers:path"; those of version 2 "0::path".
double Machine::granted_cores() const {
  const fs::path mounts = root_ / "sys/fs/cgroup";
  double smallest = kUnlimited;
  std::ifstream file(root_ / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      smallest = std::min(smallest, smallest_limit(mounts, group, limit_v2));
      smallest = std::min(smallest, smallest_limit(mounts / "unified", group, limit_v2));
    } else if (lists(controllers, "cpu")) {
      smallest = std::min(smallest, smallest_limit(mounts / controllers, group, limit_v1));
      smallest = std::min(smallest, smallest_limit(mounts / "cpu", group, limit_v1));
    }
  }
  return smallest;
}

int Machine::cores() const {
  int cores = static_cast<int>(usable_cores().size());
  if (cores == 0) cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, static_cast<int>(std::min<double>(cores, granted_cores())));
}

int Machine::gpus() const {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) return listed_gpus(visible);
  return count_numbered(root_ / "dev", "nvidia", [](const fs::path&) { return true; });
}

int Machine::memory_nodes() const {
  const std::vector<int> cores = usable_cores();
  const auto has_core = [&](const fs::path& node) {
    return std::any_of(cores.begin(), cores.end(),
                       [&](int core) { return fs::exists(node / ("cpu" + std::to_string(core))); });
  };
  const int nodes = count_numbered(root_ / "sys/devices/system/node", "node", has_core);
  return std::clamp(nodes, 1, this->cores());
}

}  // namespace cairn::run
