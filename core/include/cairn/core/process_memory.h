// The process's memory: what the operating system says of it, what the machine still has, and how
// much of it an allocator may hold on to.
//
// A process has more than live tensors: code, what libraries keep, and blocks that allocators
// cache.
#pragma once

#include <cstddef>
#include <string_view>

#include "cairn/core/device.h"

namespace cairn::core {

/// Bytes of a field of /proc/self/status: "VmRSS" (what the process has now), "VmHWM" (at most,
/// since it began or reset_most_process_memory()); 0 where the system has no such file.
std::size_t process_memory(std::string_view field);
void reset_most_process_memory();

/// What the process has in memory now, in bytes, by what it is for; all 0 where the system has no
/// /proc/self/smaps. Tensors are what the CPU's allocator holds, touched or not, cached blocks too;
/// the heap is what malloc has handed out: graphs, libraries' kernels and scratch, and once more
/// the tensors of less than 128 KiB.
struct ProcessParts {
  std::size_t code = 0;  // mapped files: the program and its libraries
  std::size_t tensors = 0;
  std::size_t heap = 0;
  std::size_t heap_free = 0;  // freed, and kept by malloc
  std::size_t stacks = 0;     // of all threads
  std::size_t other = 0;      // mapped by somebody else
};
ProcessParts process_parts();

/// Bytes that the process may still take before the system refuses or kills it: what the machine
/// has available (MemAvailable), or less where a control group (memory.max) leaves less. SIZE_MAX
/// where the system does not say.
std::size_t memory_left();

/// From now on the device's cached blocks go back to the system where live and cached ones together
/// would pass so many bytes; SIZE_MAX: where they pass the most that was live by far. A capacity
/// (set_memory_capacity) bounds live ones, too.
void set_cache_bound(Device device, std::size_t bytes);

}  // namespace cairn::core
