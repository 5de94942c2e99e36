#include "cairn/core/process_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "allocator.h"

namespace cairn::core {

namespace {

// Of "NAME:   1234 kB" in a file of such lines.
std::optional<std::size_t> field_of(const char* file, std::string_view name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name) || line[name.size()] != ':') continue;
    return std::stoull(line.substr(name.size() + 1)) * 1024;
  }
  return {};
}

// "max", or a file that is not there: no bound.
std::size_t number_in(const std::string& file) {
  std::ifstream in(file);
  std::size_t bytes = 0;
  return in >> bytes ? bytes : SIZE_MAX;
}

// What the process's group and those around it leave (control groups of version 2).
std::size_t left_by_groups() {
  std::ifstream groups("/proc/self/cgroup");
  std::size_t left = SIZE_MAX;
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    for (std::string path = line.substr(3); !path.empty();
         path.resize(path == "/" ? 0 : std::max<std::size_t>(1, path.rfind('/')))) {
      const std::string folder = "/sys/fs/cgroup" + path;
      const std::size_t most = number_in(folder + "/memory.max");
      if (most == SIZE_MAX) continue;
      const std::size_t taken = number_in(folder + "/memory.current");
      left = std::min(left, most - std::min(most, taken));
    }
  }
  return left;
}

}  // namespace

std::size_t process_memory(std::string_view field) {
  return field_of("/proc/self/status", field).value_or(0);
}

void reset_most_process_memory() {
  std::ofstream("/proc/self/clear_refs") << 5;
}

std::size_t memory_left() {
  return std::min(field_of("/proc/meminfo", "MemAvailable").value_or(SIZE_MAX), left_by_groups());
}

void set_cache_bound(Device device, std::size_t bytes) {
  allocator_of(device).set_cache_bound(bytes);
}

}  // namespace cairn::core
