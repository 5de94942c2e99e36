// How every public kernel runs: on the current stream of its device, in order.
//
//   void relu(const TensorView& x, const TensorView& y) {
//     check_same_shape("relu", "x", x, "y", y);
//     launch(y.device, [=](const Backend& backend) { backend.relu(x, y); });  // views captured by
//     value
//   }
#pragma once

#include <utility>

#include "backend.h"
#include "cairn/core/stream.h"

namespace cairn::kernels {

/// Calls work(backend) in the order of the device's current stream: at once where that is inline or
/// CUDA's (whose backend queues on it), otherwise in the stream's thread, so `work` must hold all
/// it uses by value.
template <class Work>
void launch(Device device, Work work) {
  if (device.is_cpu()) {
    const core::Stream stream = core::Stream::current(device);
    if (!stream.is_inline()) {
      stream.submit([work = std::move(work)] { work(cpu_backend()); });
      return;
    }
  }
  work(backend(device));
}

}  // namespace cairn::kernels
