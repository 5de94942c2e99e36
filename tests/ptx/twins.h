// Kernels of one warp (twin_kernels.cu) that are compiled twice: by nvcc, for machine.h and
// runtime.h, and as C++ for the emulator. The same input must give the same output.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cairn::kernels::cuda {

class Queue;

/// What a lane of the twins of products gets.
struct ProductOfLane {
  float sums[4];
  std::uint32_t a[4], b[2];
};

/// Launches the kernel of this name, from `in` to `out`, with that much dynamic shared memory.
extern "C" void launch_twin(const char* name, const Queue& queue, std::size_t shared_bytes,
                            const void* in, void* out);
using LaunchTwin = decltype(launch_twin);

}  // namespace cairn::kernels::cuda
