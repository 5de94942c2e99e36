#include "cairn/core/process_memory.h"

#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "allocator.h"
#include "cairn/core/memory.h"

namespace cairn::core {

namespace {

constexpr std::size_t kMostGuardBytes = std::size_t{64} << 10;  // below a thread's stack

// Of a line "NAME:   1234 kB".
std::optional<std::size_t> bytes_in(std::string_view name, const std::string& line) {
  if (!line.starts_with(name) || line[name.size()] != ':') return {};
  return std::stoull(line.substr(name.size() + 1)) * 1024;
}

std::optional<std::size_t> field_of(const char* file, std::string_view name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (const auto bytes = bytes_in(name, line)) return bytes;
  }
  return {};
}

struct Mapping {
  std::size_t bytes = 0;
  std::string access, name;  // "rw-p"; a file, "[heap]", or none
};

// "7f00-7f80 rw-p 00000000 08:01 1234   /lib/x.so", the first line of a mapping in smaps.
bool read_mapping(const std::string& line, Mapping& mapping) {
  std::istringstream in(line);
  std::size_t begin = 0, end = 0;
  char dash = 0;
  std::string offset, device, inode;
  if (!(in >> std::hex >> begin >> dash >> end >> mapping.access) || dash != '-') return false;
  in >> offset >> device >> inode >> mapping.name;
  mapping.bytes = end - begin;
  return true;
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

ProcessParts process_parts() {
  ProcessParts parts;
  std::size_t anonymous = 0;
  std::ifstream lines("/proc/self/smaps");
  std::size_t* part = &anonymous;
  bool behind_a_guard = false;
  for (std::string line; std::getline(lines, line);) {
    if (const auto bytes = bytes_in("Rss", line)) *part += *bytes;
    Mapping mapping;
    if (!read_mapping(line, mapping)) continue;
    const bool stack = mapping.name == "[stack]" || (behind_a_guard && mapping.name.empty());
    part = mapping.name.starts_with('/') ? &parts.code : stack ? &parts.stacks : &anonymous;
    behind_a_guard = mapping.access == "---p" && mapping.bytes <= kMostGuardBytes;
  }
  const struct mallinfo2 heap = mallinfo2();
  parts.tensors = memory_stats(Device{}).reserved;
  parts.heap = heap.uordblks + heap.hblkhd;
  parts.heap_free = heap.fordblks;
  const std::size_t heaps = parts.tensors + parts.heap + parts.heap_free;
  parts.other = anonymous - std::min(anonymous, heaps);
  return parts;
}

std::size_t memory_left() {
  return std::min(field_of("/proc/meminfo", "MemAvailable").value_or(SIZE_MAX), left_by_groups());
}

void set_cache_bound(Device device, std::size_t bytes) {
  allocator_of(device).set_cache_bound(bytes);
}

}  // namespace cairn::core
