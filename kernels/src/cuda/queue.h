// Where an operation's kernels are queued: the current stream of a device, with that device made
// current and a profiler range of the operation's name around the launches.
//
//   const Queue queue("softmax", y.device);
//   launch(queue, {rows, 256}, softmax_kernel<float>, ...);   // launch.cuh
#pragma once

#include <cstddef>
#include <memory>

#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor_view.h"

namespace cairn::kernels::cuda {

class Queue {
 public:
  Queue(const char* op, Device device);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  const char* op() const { return op_; }
  Device device() const { return device_; }
  void* stream() const { return stream_; }  // cudaStream_t
  /// Throws DeviceError where the launch before it was refused.
  void check_launch() const;

  /// Dynamic shared memory that the device gives a block of a kernel that asks for it.
  std::size_t most_shared_bytes() const;

  /// Whether what is queued here becomes part of a CUDA graph instead of running.
  bool capturing() const;

  /// Device memory for the kernels queued here; reused in stream order once the last owner lets go.
  std::shared_ptr<core::Storage> workspace(std::size_t bytes) const;

  void copy(void* dst, const void* src, std::size_t bytes) const;    // within the device
  void upload(void* dst, const void* src, std::size_t bytes) const;  // from the host; no wait

 private:
  const char* op_;
  Device device_;
  core::DeviceGuard guard_;
  void* stream_;
};

/// Typed workspace.
template <class T>
class Buffer {
 public:
  Buffer(const Queue& queue, std::int64_t count)
      : storage_(queue.workspace(static_cast<std::size_t>(count) * sizeof(T))) {}
  T* data() const { return static_cast<T*>(storage_->data()); }

 private:
  std::shared_ptr<core::Storage> storage_;
};

}  // namespace cairn::kernels::cuda
