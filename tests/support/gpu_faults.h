// Calls of simulated GPUs that fail.
#pragma once

#include <cstdint>
#include <string>

namespace cairn::test {

/// While it lives, the nth next call of a function of the CUDA runtime, cuBLASLt or cuDNN in this
/// process answers `code` instead of being done. Nothing on other GPUs.
class GpuFault {
 public:
  GpuFault(const std::string& call, std::uint64_t nth, int code);
  ~GpuFault();
  GpuFault(const GpuFault&) = delete;
  GpuFault& operator=(const GpuFault&) = delete;
};

}  // namespace cairn::test
