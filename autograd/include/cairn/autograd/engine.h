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
  /// Gradients that have a graph of their own, to be differentiated again (a gradient penalty).
  /// Throws core::Unsupported: backwards record nothing.
  bool create_graph = false;
  /// Whoever multiplied root says so here; its gradients carry the word until a step.
  core::GradientScale scale;
};

/// Accumulates d root / d leaf * gradient into every leaf that root depends on and that requires
/// it. `gradient` has root's shape and dtype; undefined means 1, for a root of one element. Throws
/// core::InvalidArgument where root has no graph, core::Error where the graph was released. A
/// parameter that gets a gradient although no optimizer has it, beside others that one has, is
/// named in a warning, once.
///
/// A backward is a run: it ends or throws as a whole (core::GradientSlot). After a throw, gradients
/// that were empty before are empty again, and those that it has added to are refused by the next
/// step. A backward inside an operation's backward belongs to the run around it.
void backward(const Tensor& root, const Tensor& gradient = {}, const BackwardOptions& options = {});

/// Removes its hook when destroyed.
class [[nodiscard]] HookHandle {
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
/// also for tied weights). The leaf may start to require a gradient later.
HookHandle on_gradient_ready(const Tensor& leaf, std::function<void(const Tensor&)> hook);
/// From inside a hook: runs `callback` once when the current run has run its last node (before
/// backward() returns); where the run throws, `on_abort` with its error instead. Errors of
/// `callback` propagate as the run's; one of `on_abort` is logged, and the caller gets the run's
/// own.
using OnAbort = std::function<void(const std::string& error)>;
void on_backward_end(std::function<void()> callback, OnAbort on_abort = nullptr);
/// From inside a hook: the leaf takes part in the current run although the graph does not reach it
/// (a gradient of zero is about to be written for it).
void join_run(const Tensor& leaf);
/// The run that this thread is inside of; 0: none.
core::RunId current_run();
inline bool in_backward() {
  return current_run() != 0;
}

}  // namespace cairn::autograd
