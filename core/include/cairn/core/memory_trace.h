// What a device's allocator does, for timelines of memory: each allocation with its category, the
// step and what was under way. Off unless it is asked for; then each event costs a reading of the
// clock and a copy of 100 bytes.
//
//   core::trace_memory(device, 100'000);
//   train_step();
//   const core::MemoryTrace trace = core::memory_trace(device);
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "cairn/core/device.h"
#include "cairn/core/memory.h"

namespace cairn::core {

struct MemoryEvent {
  enum class Action : std::uint8_t {
    allocate,
    request_free,   // its last owner is gone; queued work may still use it
    free,           // the block may serve others
    take_segment,   // memory that blocks lie in, from the system or as a part of another segment
    give_segment,   // back, or to become parts of others
    out_of_memory,  // a request that was refused
  };
  static constexpr int kLabels = 2;  // the innermost MemoryLabel of the thread, and the outermost
  using Label = std::array<char, 24>;

  Action action{};
  MemoryCategory category = MemoryCategory::other;
  std::array<Label, kLabels> labels{};  // of allocations; cut short, and empty where there are none
  std::int64_t step = 0;                // of set_memory_step()
  std::int64_t unix_us = 0;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;  // of a block: that were asked for
  std::uint64_t stream = 0;
  std::uint64_t available = 0;  // to a request that was refused: what its device's capacity leaves
};

/// Memory that the allocator has, as it is now.
struct MemorySegment {
  struct Block {
    enum class State : std::uint8_t { live, leaving, cached };  // leaving: after request_free
    State state{};
    MemoryCategory category = MemoryCategory::other;
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t requested = 0;  // of them; 0 where cached
  };
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stream = 0;
  std::vector<Block> blocks;  // by address, without gaps
};

struct MemoryTrace {
  std::vector<MemoryEvent> events;  // the last ones
  std::uint64_t dropped = 0;        // before them
  std::vector<MemorySegment> segments;
};

/// Keeps the last so many events of the device, 100 bytes each, at most 10 million; 0: none any
/// more. What was kept before is forgotten. On the CPU a segment is a block.
void trace_memory(Device device, std::size_t events);
MemoryTrace memory_trace(Device device);

/// The step under way in this process, which events are told with.
void set_memory_step(std::int64_t step);

/// What this thread does, from here to the end of the scope: an operation, a part of a step. The
/// name must live as long.
class [[nodiscard]] MemoryLabel {
 public:
  explicit MemoryLabel(std::string_view name);
  ~MemoryLabel();
  MemoryLabel(const MemoryLabel&) = delete;
  MemoryLabel& operator=(const MemoryLabel&) = delete;

 private:
  friend class MemoryTracer;
  std::string_view name_;
  const MemoryLabel* outer_;
};

/// For as long as it lives, `told` is called where a request ends in OutOfMemory, in the thread
/// that asked and before the exception is thrown; of one process, one call at a time. It must not
/// throw.
class [[nodiscard]] OutOfMemoryObservation {
 public:
  explicit OutOfMemoryObservation(std::function<void(Device)> told);
  ~OutOfMemoryObservation();
  OutOfMemoryObservation(const OutOfMemoryObservation&) = delete;
  OutOfMemoryObservation& operator=(const OutOfMemoryObservation&) = delete;

 private:
  std::function<void(Device)> told_;
};

}  // namespace cairn::core
