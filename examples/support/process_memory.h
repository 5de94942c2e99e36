// What the operating system says of this process's memory.
#pragma once

#include <cstddef>
#include <string_view>

namespace support {

/// Bytes of a field of /proc/self/status: "VmRSS" (what the process has now), "VmHWM" (at most,
/// since it began or reset_most_memory()); 0 where the system has no such file.
std::size_t process_memory(std::string_view field);
void reset_most_memory();

}  // namespace support
