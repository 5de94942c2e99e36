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

/// Bytes that the process may still take before the system refuses or kills it: what the machine
/// has available (MemAvailable), or less where a control group (memory.max) leaves less. SIZE_MAX
/// where the system does not say.
std::size_t memory_left();

/// From now on the device's cached blocks go back to the system where live and cached ones together
/// would pass so many bytes; SIZE_MAX: where they pass the most that was live by far. A capacity
/// (set_memory_capacity) bounds live ones, too.
void set_cache_bound(Device device, std::size_t bytes);

}  // namespace cairn::core
