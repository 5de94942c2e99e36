// Which gradients of this rank were not finite before they were reduced: every bucket is checked on
// the communication stream, ahead of its reduction, and read by the host only when somebody asks.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/world.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::parallel {

class LocalChecks {
 public:
  /// A backward pass that reduces begins. Only the last few passes are kept: who asks does so
  /// before the next step, and before that an overflow of several losses may have come.
  void begin_pass();
  /// A gradient's place in the list, by which what is found is ordered, and its name.
  using Name = std::pair<std::size_t, std::string>;
  /// Queues the check of a bucket on the current stream: gradients of one dtype.
  void check(std::vector<Name> names, const std::vector<TensorView>& gradients);
  void forget() { passes_.clear(); }
  /// What the kept passes found, a gradient once. Waits for the device. All is forgotten then.
  std::vector<core::NonFinite> take();

 private:
  struct Bucket {
    std::vector<Name> names;
    kernels::PendingCheck check;
  };
  std::deque<std::vector<Bucket>> passes_;
};

}  // namespace cairn::parallel
