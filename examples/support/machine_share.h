// How much of what the machine can compute a training uses.
#pragma once

#include <chrono>

#include "cairn/autograd/observer.h"

namespace support {

class MachineShare : public cairn::autograd::ScopedObserver {
 public:
  /// Measures how fast the device multiplies large matrices of this dtype, the machine's limit.
  MachineShare(cairn::Device device, cairn::DType dtype);
  /// Of this thread's linear maps, products and convolutions since the last call (in forward, and
  /// twice as much for their backward): the share of what the limit would have allowed since.
  double take();

 private:
  using Clock = std::chrono::steady_clock;
  void on_end(const cairn::autograd::OpEvent& event) override;
  double limit_ = 0;  // operations a second
  double operations_ = 0;
  Clock::time_point since_;
};

}  // namespace support
