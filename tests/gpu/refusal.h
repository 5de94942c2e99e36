// A GPU that refuses a kernel, or memory.
#pragma once

#include <cuda_runtime_api.h>

#include "cairn/core/memory.h"
#include "gpu/vendor_support.h"

namespace cairn::test {

inline constexpr Device kGpu{DeviceType::cuda, 0};

/// The nth kernel from now on, or memory after so many blocks of it.
class Refusal {
 public:
  Refusal(bool memory, std::uint64_t nth) {
    if (memory) {
      core::set_memory_capacity(kGpu, core::memory_stats(kGpu).current_total + 4096 * (nth - 1));
    } else {
      gpusim::inject("cudaLaunchKernel", nth, cudaErrorInvalidValue);
    }
  }
  ~Refusal() {
    core::set_memory_capacity(kGpu, SIZE_MAX);
    gpusim::clear_injected();
  }
  Refusal(const Refusal&) = delete;
  Refusal& operator=(const Refusal&) = delete;
};

}  // namespace cairn::test
