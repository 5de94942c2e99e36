// The stream rule, in one place: a validated kernel runs on its device's current stream.
#pragma once

#include <utility>

#include "cairn/core/stream.h"

namespace cairn::kernels {

/// Calls `work` with the device current. CUDA backends queue on the current stream themselves; on
/// the CPU work for a worker stream is queued there, so `work` must hold what it uses by value.
template <class Work>
void launch(core::Device device, Work&& work) {
  if (device.is_cuda()) {
    const core::DeviceGuard guard(device);
    work();
    return;
  }
  const core::Stream stream = core::Stream::current(device);
  if (stream.is_inline()) {
    work();
  } else {
    stream.submit(std::forward<Work>(work));
  }
}

}  // namespace cairn::kernels
