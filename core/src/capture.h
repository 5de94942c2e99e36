// The capture that is under way in this thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/generator.h"
#include "cairn/core/graph.h"

namespace cairn::core {

/// What work finds while it is recorded.
struct Capture {
  void* stream = nullptr;
  const std::uint64_t* random_base = nullptr;  // on the device: seed, offset
  Generator before;                            // as the capture found it
  std::vector<ReplayHook>* hooks = nullptr;
  std::uint64_t number = 0;
};

const Capture* current_capture();  // null: none
/// Nobody may ask, nor mark a point, while any thread records the stream's work.
bool is_recorded(const Stream& stream);
inline void* capture_stream() {
  return current_capture()->stream;
}

}  // namespace cairn::core
