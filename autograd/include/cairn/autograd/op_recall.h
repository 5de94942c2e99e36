// Results of operations given back instead of computed again: what selective recomputation is made
// of. At most one recall is installed on a thread; it sees every operation but casts, in order, and
// none that an operation runs inside of its forward.
#pragma once

#include <span>

#include "cairn/core/tensor.h"

namespace cairn::autograd {

class OpRecall {
 public:
  virtual ~OpRecall() = default;
  /// Before an operation's forward; the inputs as it gets them, after casts. A defined tensor is
  /// its result: the forward does not run, saves nothing, and no observer sees it.
  virtual Tensor recall(const char* name, std::span<const Tensor> inputs) = 0;
  /// After a forward that ran; the result is still without a graph.
  virtual void ran(const Tensor& result) = 0;
};

/// Installs a recall on this thread for as long as the guard lives; null: none.
class [[nodiscard]] OpRecallGuard {
 public:
  explicit OpRecallGuard(OpRecall* recall);
  ~OpRecallGuard();
  OpRecallGuard(const OpRecallGuard&) = delete;
  OpRecallGuard& operator=(const OpRecallGuard&) = delete;

 private:
  OpRecall* previous_;
};

}  // namespace cairn::autograd
