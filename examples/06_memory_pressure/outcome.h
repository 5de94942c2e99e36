// What a way of training came to: measured in a process of its own.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cairn/core/device.h"

namespace memory_pressure {

struct Sizes {
  std::int64_t words = 40'000, width = 64, length = 250, sentences = 32;  // the language model
  std::int64_t blocks = 64, channels = 8, side = 512;                     // the chain
};

struct Job {
  Sizes sizes;
  std::size_t budget = 0;  // bytes on each device; 0: no cap
  int devices = 4;         // of the balanced criterion
  int steps = 3;
  int pieces = 8;  // micro-batches, and pieces of the loss
  std::uint64_t seed = 1;
};

struct Outcome {
  std::string name;
  std::string refusal;  // what OutOfMemory said; empty: it fits
  std::vector<double> losses;
  double seconds = 0;       // a step, the first one apart
  std::size_t device = 0;   // peak of live tensors on the fullest device
  std::size_t tensors = 0;  // the same, of all devices together
  std::size_t program = 0;  // the process before: code, libraries
  std::size_t process = 0;  // VmHWM

  bool fits() const { return refusal.empty(); }
};

/// A way to train, by its name on the command line.
struct Way {
  std::string name;
  std::string what;  // one line for people
  /// Trains and returns the losses; calls `stepped` after each step.
  std::function<std::vector<double>(const Job&, const std::function<void()>& stepped)> train;
};

/// Runs it in this process: once at a small size, so that code and libraries are there, then as the
/// job says on capped devices.
Outcome measure(const Way& way, const Job& job);

}  // namespace memory_pressure
