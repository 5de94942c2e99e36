// When a GPU reached points in its streams, in the host's time. The host queues work and goes on,
// so its own clock tells when work was queued, not when it ran.
//
//   const core::TimeMark before = core::mark_time(device);
//   train_step();
//   const core::TimeMark after = core::mark_time(device);
//   loss.item();  // waits
//   std::printf("%g s\n", core::time_of(after).seconds - core::time_of(before).seconds);
#pragma once

#include <cstdint>

#include "cairn/core/device.h"

namespace cairn::core {

/// A point in a stream. It may be copied and forgotten at no cost. 0: none.
struct TimeMark {
  std::uint64_t number = 0;
};

/// The point after what the calling thread's current stream of the device has so far. None on a
/// CPU, in a stream that is captured, and where CUDA has failed. Does not throw.
TimeMark mark_time(Device device);

struct MarkedTime {
  enum class State : std::uint8_t {
    ahead,    // the device has not reached it yet
    reached,  // at `seconds`
    unknown   // none, CUDA has failed, or more than 16,384 others came later
  };
  State state = State::unknown;
  double seconds = 0;  // of std::chrono::steady_clock
};

/// Of marks of one stream the seconds' differences are the device's. That they are the host's time
/// is kept true by what the host knows: a point is reached after it was marked, and before the host
/// finds it reached. Does not wait. Any thread may ask, as often as it likes.
MarkedTime time_of(TimeMark mark);

/// From here on the device's time is the host's anew, exactly: for a moment in which the current
/// stream has nothing to do. Else the clocks' rates let them drift apart until it is idle.
void align_device_time(Device device);

}  // namespace cairn::core
