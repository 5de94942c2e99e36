// Between polls of a library that gives nothing to sleep on.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace cairn::parallel {

/// At once for a while, because most calls need some microseconds; then with growing sleeps, which
/// leave the core to others.
class Pause {
 public:
  void operator()() {
    if (++polls_ <= kYields) return std::this_thread::yield();
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongest);
  }

 private:
  static constexpr int kYields = 200;
  static constexpr std::chrono::microseconds kLongest{200};
  int polls_ = 0;
  std::chrono::microseconds sleep_{10};
};

}  // namespace cairn::parallel
