// How every public kernel runs: on the current stream of its device, in order.
//
//   void relu(const TensorView& x, const TensorView& y) {
//     check_same_shape("relu", "x", x, "y", y);
//     launch(y.device, [=](const Backend& backend) { backend.relu(x, y); });  // views captured by
//     value
//   }
#pragma once

#include <type_traits>
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

/// The same for work whose result the host needs now: waits for the stream.
template <class Work>
std::invoke_result_t<Work, const Backend&> launch_and_wait(Device device, Work work) {
  if (device.is_cuda()) return work(backend(device));
  const core::Stream stream = core::Stream::current(device);
  if (stream.is_inline()) return work(cpu_backend());
  std::invoke_result_t<Work, const Backend&> result;
  stream.submit([&] { result = work(cpu_backend()); });
  stream.synchronize();
  return result;
}

}  // namespace cairn::kernels
