// Moves batches from host memory to a device on a stream of its own, ahead of the consumer.
#pragma once

#include <deque>

#include "cairn/core/stream.h"
#include "cairn/data/loader.h"

namespace cairn::data::detail {

class DeviceCopy {
 public:
  explicit DeviceCopy(Device device);
  /// Waits for the copies under way: their memory ends after it.
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  bool empty() const { return under_way_.empty(); }
  /// Starts to copy a host batch. The device memory belongs to the calling thread's current stream.
  void start(Batch host);
  /// The oldest batch started, ordered into the calling thread's current stream.
  Batch take();

 private:
  struct Copy {
    Batch host;
    Batch device;
    core::Event done;
  };

  Device device_;
  core::Stream stream_;
  std::deque<Copy> under_way_;
  std::deque<Copy> taken_;  // keep the host memory until its copy is done
};

}  // namespace cairn::data::detail
