// The clock that waits are measured with.
#pragma once

#include <chrono>

namespace cairn::parallel {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

}  // namespace cairn::parallel
