// Default hooks of saved tensors, for C++: libtorch's own (at::SavedTensorDefaultHooks) take Python
// functions only, but ask the engine, which may be another one.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace cairn::libtorch {

using MakeHooks = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

/// What a hook keeps of a tensor as it is: a node's own result would keep its node, whose hook
/// keeps it, for ever.
inline at::Tensor without_graph(const at::Tensor& x) {
  return x.defined() ? x.detach() : x;
}

/// Of this thread, innermost last. An empty function: nothing is hooked.
void push_hooks(MakeHooks make);
void pop_hooks();

}  // namespace cairn::libtorch
