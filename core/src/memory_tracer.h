// The last events of an allocator, which holds its lock around each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cairn/core/memory_trace.h"

namespace cairn::core {

class MemoryTracer {
 public:
  explicit MemoryTracer(std::size_t events) : events_(events) {}

  void note(MemoryEvent event) noexcept;  // step, time and labels are added
  std::vector<MemoryEvent> events() const;
  std::uint64_t dropped() const { return noted_ - kept(); }

 private:
  std::uint64_t kept() const { return noted_ < events_.size() ? noted_ : events_.size(); }
  std::vector<MemoryEvent> events_;  // the n-th at n % size
  std::uint64_t noted_ = 0;
};

void tell_out_of_memory(Device device) noexcept;

}  // namespace cairn::core
