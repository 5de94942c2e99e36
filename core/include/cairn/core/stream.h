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
  /// The calling thread's current stream of the device, which is the default one unless a
  /// StreamGuard has set another.
  static Stream current(Device device);
  static Stream default_stream(Device device);
  /// A new stream. It ends with the last copy of this handle, after its work is done. `name`
  /// appears in profiles and errors.
  static Stream create(Device device, const char* name = "stream");
  /// A CUDA stream (cudaStream_t) that somebody else made and ends: their work and Cairn's are in
  /// one order under a StreamGuard of it. Handles of the same stream are equal. Throws
  /// InvalidArgument for a CPU device.
  static Stream wrap(Device device, void* native);

  Device device() const;
  bool is_inline() const;  // the CPU's default stream
  bool idle() const;       // whether no work is queued; work that asks from inside does not count
  /// Runs `work` in stream order: at once where the stream is inline, later in the stream's worker
  /// thread, or, on CUDA, at once on the host with this stream current, so that what it launches is
  /// queued here. Throws Unsupported for a worker's while a Graph is captured: no replay would ask
  /// it again.
  void submit(std::function<void()> work) const;
  /// Makes later work start after the event. Only where the stream is inline does the host wait,
  /// and an error of the event's stream is then rethrown here.
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

/// Another library's current stream (cudaStream_t) of CUDA device `index`, in the calling thread.
using CurrentStreamSource = void* (*)(int index);
/// From now on Stream::current() of a CUDA device is what `source` says, in every thread and
/// wherever no StreamGuard says otherwise: what Cairn queues comes between the other library's
/// calls. Null: the default stream again.
void follow_current_stream(CurrentStreamSource source);

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

/// Makes a stream the calling thread's current one for as long as the guard lives.
class [[nodiscard]] StreamGuard {
 public:
  explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  std::shared_ptr<Stream::Impl> previous_;
  Device device_;
};

/// Makes a device the calling thread's current one for as long as the guard lives (cudaSetDevice on
/// CUDA, which gives the thread a context as well). It does not change where tensors are made:
/// DefaultDeviceGuard does. Throws DeviceError where CUDA refuses, as it does every call of a
/// process that was forked from one with a context.
class [[nodiscard]] DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // CUDA device index to restore; -1: none
};

}  // namespace cairn::core
