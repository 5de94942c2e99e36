// The backward pass.
//
// Nodes run when all gradients of their output have arrived (dependency counting; no recursion),
// newest first, and a leaf the moment its last contribution is there, so leaves become ready in
// reverse layer order whatever the operand order. The pass runs in the caller's thread, on its
// current streams, with autocast off and recording off. Errors name the node.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "cairn/core/tensor.h"

namespace cairn::autograd {

struct BackwardOptions {
  bool retain_graph = false;  // keep saved tensors for another backward through the same graph
};

/// Accumulates d root / d leaf * gradient into every leaf that root depends on and that requires
/// it. `gradient` has root's shape and dtype; undefined means 1, for a root of one element. Throws
/// core::InvalidArgument where root has no graph, core::Error where the graph was released.
void backward(const Tensor& root, const Tensor& gradient = {}, const BackwardOptions& options = {});

/// Removes its hook when destroyed.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  ~HookHandle() { remove(); }
  HookHandle(HookHandle&& other) noexcept : remove_(std::exchange(other.remove_, nullptr)) {}
  HookHandle& operator=(HookHandle&& other) noexcept {
    remove();
    remove_ = std::exchange(other.remove_, nullptr);
    return *this;
  }
  void remove() {
    if (remove_) std::exchange(remove_, nullptr)();
  }

 private:
  std::function<void()> remove_;
};

/// Calls hook(leaf) in each backward when the leaf's gradient of that backward is complete (once,
/// also for tied weights).
HookHandle on_gradient_ready(const Tensor& leaf, std::function<void(const Tensor&)> hook);
/// From inside a hook: runs `callback` once when the current backward has run its last node (before
/// backward() returns). Errors propagate.
void on_backward_end(std::function<void()> callback);
/// True on a thread that is inside backward().
bool in_backward();

}  // namespace cairn::autograd
