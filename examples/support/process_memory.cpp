#include "support/process_memory.h"

#include <fstream>
#include <string>

namespace support {

std::size_t process_memory(std::string_view field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(field) || line[field.size()] != ':') continue;
    return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

void reset_most_memory() {
  std::ofstream("/proc/self/clear_refs") << 5;
}

}  // namespace support
