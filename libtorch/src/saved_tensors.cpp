#include "saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <any>
#include <utility>
#include <vector>

#include "cairn/libtorch/checkpoint.h"
#include "cairn/libtorch/tensors.h"
#include "operation_watch.h"

namespace cairn::libtorch {

namespace {

std::vector<MakeHooks>& hook_stack() {
  thread_local std::vector<MakeHooks> stack;
  return stack;
}

class HookedEngine final : public torch::autograd::Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const std::vector<MakeHooks>& stack = hook_stack();
    return stack.empty() || !stack.back() ? nullptr : stack.back()();
  }
};

torch::autograd::Engine& hooked_engine() {
  static auto* engine =
      new HookedEngine();  // as long as the process: threads of libtorch's may use it
  return *engine;
}

void install_engine() {
  static const bool installed = [] {
    torch::autograd::set_default_engine_stub(&hooked_engine);
    return true;
  }();
  static_cast<void>(installed);
}

/// A saved tensor in the hands of Cairn's hooks.
class CairnHooks final : public torch::autograd::SavedVariableHooks {
 public:
  CairnHooks(std::shared_ptr<const autograd::SavedTensorHooks> hooks, const OperationWatch& watch)
      : hooks_(std::move(hooks)), watch_(watch) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    packs_ = tensor.defined() && tensor.layout() == at::kStrided && !watch_.existed(tensor);
    packed_ = packs_ ? hooks_->pack(to_cairn(tensor)) : std::any(without_graph(tensor));
  }
  at::Tensor call_unpack_hook() override {
    return packs_ ? to_torch(hooks_->unpack(packed_)) : std::any_cast<at::Tensor>(packed_);
  }

 private:
  std::shared_ptr<const autograd::SavedTensorHooks> hooks_;
  const OperationWatch& watch_;
  std::any packed_;
  bool packs_ = false;
};

}  // namespace

void push_hooks(MakeHooks make) {
  install_engine();
  hook_stack().push_back(std::move(make));
}

void pop_hooks() {
  hook_stack().pop_back();
}

SavedTensorHooksGuard::SavedTensorHooksGuard(autograd::SavedTensorHooks hooks)
    : watch_(std::make_unique<OperationWatch>()) {
  auto shared = std::make_shared<const autograd::SavedTensorHooks>(std::move(hooks));
  push_hooks(
      [shared, watch = watch_.get()] { return std::make_unique<CairnHooks>(shared, *watch); });
}

SavedTensorHooksGuard::~SavedTensorHooksGuard() {
  pop_hooks();
}

}  // namespace cairn::libtorch
