// Hooks for what operations save for their backward: recomputation, offload and accounting are all
// such hooks.
//
// Hooks form a stack per thread; the innermost pair gets the tensor. `pack` is called when an op
// saves a tensor and returns anything; `unpack` gets that back when the backward asks and must
// return a tensor of the same shape and dtype. A parameter arrives as itself, anything else without
// its graph. Operations inside a hook see only the hooks around its own pair.
#pragma once

#include <any>
#include <functional>

#include "cairn/core/tensor.h"

namespace cairn::autograd {

struct SavedTensorHooks {
  std::function<std::any(const Tensor&)> pack;
  std::function<Tensor(const std::any&)> unpack;
};

class [[nodiscard]] SavedTensorHooksGuard {
 public:
  explicit SavedTensorHooksGuard(SavedTensorHooks hooks);
  ~SavedTensorHooksGuard();
  SavedTensorHooksGuard(const SavedTensorHooksGuard&) = delete;
  SavedTensorHooksGuard& operator=(const SavedTensorHooksGuard&) = delete;
};

}  // namespace cairn::autograd
