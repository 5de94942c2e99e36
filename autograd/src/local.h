// What one thread keeps for autograd.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cairn/autograd/observer.h"
#include "cairn/autograd/op_recall.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"

namespace cairn::autograd {

using HookStack = std::vector<std::shared_ptr<const SavedTensorHooks>>;

class Node;

/// The time that observers are told.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Gradients of the running backward that wait for further contributions.
class PendingGradients {
 public:
  virtual Tensor* find(Node* node) = 0;  // null: none has come yet

 protected:
  ~PendingGradients() = default;
};

/// The outermost backward of a thread: what ends or throws as a whole.
struct RunRecord {
  core::RunId id = 0;
  core::GradientScale scale;
  std::vector<Tensor> leaves;  // whose slots it has begun
  std::vector<std::function<void()>> on_end;
  std::vector<std::function<void(const std::string& error)>> on_abort;
};

struct Local {
  bool grad_enabled = true;
  bool recomputing = false;
  AutocastState autocast;
  HookStack hooks;
  OpObserver* observer = nullptr;
  OpRecall* recall = nullptr;           // null also inside of an operation
  RunRecord* run = nullptr;             // null: outside of any backward
  PendingGradients* pending = nullptr;  // of the innermost backward
};

Local& local();

}  // namespace cairn::autograd
