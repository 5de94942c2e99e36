// Work for several devices at the same time.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "cairn/core/stream.h"

namespace cairn::parallel {

/// A thread for each device but the first, kept from call to call.
class Workers {
 public:
  /// work(i) for each device i: the first in this thread, the others in theirs, with this thread's
  /// state (autograd::ThreadState, streams, memory category) and device i the default one. Returns
  /// when all have ended; throws the error of the first device that has one, with the device's
  /// name.
  void run(const std::vector<Device>& devices, const std::function<void(std::size_t)>& work);

 private:
  std::vector<core::Stream> threads_;  // CPU streams, whose threads run the host's side
};

}  // namespace cairn::parallel
