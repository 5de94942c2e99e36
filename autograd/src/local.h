// What one thread keeps for autograd.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cairn/autograd/observer.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"

namespace cairn::autograd {

using HookStack = std::vector<std::shared_ptr<const SavedTensorHooks>>;

class Node;

/// Gradients of the running backward that wait for further contributions.
class PendingGradients {
 public:
  virtual Tensor* find(Node* node) = 0;  // null: none has come yet

 protected:
  ~PendingGradients() = default;
};

struct Local {
  bool grad_enabled = true;
  bool recomputing = false;
  AutocastState autocast;
  HookStack hooks;
  OpObserver* observer = nullptr;
  std::vector<std::function<void()>>* end_callbacks = nullptr;  // of the running backward
  PendingGradients* pending = nullptr;                          // likewise
};

Local& local();

}  // namespace cairn::autograd
