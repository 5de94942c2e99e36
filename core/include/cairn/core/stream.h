// Streams and events: in-order queues of work on a device, and points in them.
//
// CUDA streams wrap the driver's. On the CPU the default stream runs work inline, in the calling
// thread, before submit() returns; further streams are worker threads that run their work in order,
// so code that overlaps work on CUDA overlaps it on the CPU too. Kernels and copy_bytes queue on
// the current stream of their device; inside a worker's own work they run inline. An error in a
// worker stays with its stream and is rethrown, once, by the next synchronize() of it or of an
// event recorded in it; until then the stream's later work is dropped, and streams that wait for
// its events fail with the same error.
#pragma once

#include <functional>
#include <memory>

#include "cairn/core/device.h"

namespace cairn::core {

class Event;

class Stream {
 public:
  /// The calling thread's current stream of the device: the default one unless a StreamGuard says
  /// otherwise.
  static Stream current(Device device);
  static Stream default_stream(Device device);
  /// A new stream; it ends (after its work) with its last copy. `name` appears in profiles and
  /// errors.
  static Stream create(Device device, const char* name = "stream");

  Device device() const;
  bool is_inline() const;  // the CPU's default stream
  bool idle() const;       // no queued work left, apart from what asks from inside it
  /// Runs `work` in stream order: inline, in the worker thread, or (CUDA) now on the host with this
  /// stream current, so that what it launches is queued here.
  void submit(std::function<void()> work) const;
  /// Later work starts after the event. The host does not wait, except where the stream is inline:
  /// that waits, and rethrows, here.
  void wait(const Event& event) const;
  void synchronize() const;  // the host waits; rethrows a worker's error
  void* native() const;      // cudaStream_t; nullptr on the CPU
  bool operator==(const Stream& other) const { return impl_ == other.impl_; }

  struct Impl;
  explicit Stream(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  friend class Event;
  friend class StreamGuard;
  std::shared_ptr<Impl> impl_;
};

class Event {
 public:
  explicit Event(Device device);
  Device device() const;
  void record(const Stream& stream);  // marks the point after the work submitted so far
  bool done() const;                  // true where never recorded
  void synchronize() const;           // the host waits; rethrows the stream's error

  struct Impl;

 private:
  friend class Stream;
  std::shared_ptr<Impl> impl_;
};

/// Makes a stream the calling thread's current one.
class StreamGuard {
 public:
  explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  std::shared_ptr<Stream::Impl> previous_;
  Device device_;
};

/// Makes a device the calling thread's current one (cudaSetDevice on CUDA; factories without a
/// device still mean cpu:0).
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // CUDA device index to restore; -1: none
};

}  // namespace cairn::core
