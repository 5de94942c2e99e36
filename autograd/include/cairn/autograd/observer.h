// Observers see every operation: profilers, planners and explain reports are observers. None
// installed costs one pointer test per op.
#pragma once

#include <cstdint>
#include <string>

#include "cairn/core/device.h"
#include "cairn/core/dtype.h"

namespace cairn::autograd {

enum class Phase { forward, backward, recompute };

struct OpEvent {
  const char* name = "";
  Phase phase = Phase::forward;
  Device device;
  DType dtype = DType::f32;      // of the first floating input, after casts
  std::int64_t bytes_out = 0;    // of the result(s)
  std::int64_t bytes_saved = 0;  // kept for the backward
  std::int64_t casts = 0;        // inputs that autocast converted
  std::int64_t bytes_cast = 0;   // bytes written by those conversions
  std::int64_t host_ns = 0;
};

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void begin(const OpEvent& event) { (void)event; }
  virtual void end(const OpEvent& event) = 0;
};

/// Installs an observer on this thread; null removes it. Returns the previous one.
OpObserver* set_observer(OpObserver* observer);

}  // namespace cairn::autograd
