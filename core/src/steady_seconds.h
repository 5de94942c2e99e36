#pragma once

#include <chrono>

namespace cairn::core {

inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace cairn::core
