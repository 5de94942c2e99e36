// memory_snapshot.pickle: what a device's memory did and holds, as torch.cuda.memory's snapshots
// say it, for pytorch.org/memory_viz and torch.cuda._memory_viz.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>

#include "cairn/core/device.h"
#include "cairn/core/memory_trace.h"
#include "files.h"

namespace cairn::observe {

std::string memory_snapshot(const core::MemoryTrace& trace, Device device);

/// Keeps the last so many events of a device's memory (0: none) and writes them into the folder:
/// where a request is refused, and at the end of a run in which none was.
class MemoryRecorder {
 public:
  MemoryRecorder(Device device, std::size_t events, const std::string& folder);
  ~MemoryRecorder() { end(); }
  MemoryRecorder(const MemoryRecorder&) = delete;
  MemoryRecorder& operator=(const MemoryRecorder&) = delete;
  void end();

 private:
  void write();
  Device device_;
  std::string path_;
  std::mutex mutex_;
  Failures failures_;
  bool written_ = false;
  std::optional<core::OutOfMemoryObservation> refused_;
};

}  // namespace cairn::observe
