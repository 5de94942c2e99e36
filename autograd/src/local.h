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

struct Local {
  bool grad_enabled = true;
  bool recomputing = false;
  AutocastState autocast;
  HookStack hooks;
  OpObserver* observer = nullptr;
  std::vector<std::function<void()>>* end_callbacks = nullptr;  // of the running backward
};

Local& local();

}  // namespace cairn::autograd
