#include "cairn/autograd/saved_tensor.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "local.h"

namespace cairn::autograd {

using core::Error;
using core::fail;

namespace {

// Runs a pack or unpack function with the hooks around its own, so that operations inside it do not
// come back to it.
class OutsideHooks {
 public:
  explicit OutsideHooks(const std::shared_ptr<const SavedTensorHooks>& hooks) {
    HookStack& stack = local().hooks;
    const auto own = std::find(stack.begin(), stack.end(), hooks);
    inner_.assign(std::make_move_iterator(own), std::make_move_iterator(stack.end()));
    stack.erase(own, stack.end());
  }
  ~OutsideHooks() {
    HookStack& stack = local().hooks;
    stack.insert(stack.end(), inner_.begin(), inner_.end());
  }
  OutsideHooks(const OutsideHooks&) = delete;
  OutsideHooks& operator=(const OutsideHooks&) = delete;

 private:
  HookStack inner_;
};

}  // namespace

bool is_parameter(const Tensor& tensor) {
  return tensor.requires_grad() && tensor.attachments().graph == nullptr;
}

SavedTensor::SavedTensor(const Tensor& tensor) {
  if (!tensor.defined()) return;
  const HookStack& stack = local().hooks;
  if (stack.empty()) {
    tensor_ = tensor.detach();
    version_ = tensor.storage()->version();
    return;
  }
  const std::shared_ptr<const SavedTensorHooks> hooks = stack.back();
  const OutsideHooks outside(hooks);
  // A hook may want to know a parameter when it sees one; anything else comes without its graph.
  std::any value = hooks->pack(is_parameter(tensor) ? tensor : tensor.detach());
  packed_.reset(new Packed{std::move(value), hooks, tensor.shape(), tensor.dtype()});
}

Tensor SavedTensor::unpack(const char* op) const {
  if (packed_) {
    const OutsideHooks outside(packed_->hooks);
    Tensor tensor = packed_->hooks->unpack(packed_->value);
    const bool alike =
        tensor.defined() && tensor.shape() == packed_->shape && tensor.dtype() == packed_->dtype;
    if (alike) return tensor;
    fail<Error>(op, "expected the unpack hook to return the packed ", packed_->shape, " ",
                packed_->dtype, ", got ",
                tensor.defined() ? core::str(tensor.shape(), " ", tensor.dtype()) : "undefined");
  }
  if (tensor_.defined() && tensor_.storage()->version() != version_) {
    fail<Error>(op, "expected the saved ", tensor_.shape(), " ", tensor_.dtype(),
                " unchanged since the forward, got one written in place (version ",
                tensor_.storage()->version(), " instead of ", version_,
                "; run backward first, or write to a copy)");
  }
  return tensor_;
}

SavedTensorHooksGuard::SavedTensorHooksGuard(SavedTensorHooks hooks) {
  CAIRN_CHECK(hooks.pack && hooks.unpack, "saved_tensor_hooks",
              "expected a pack and an unpack function, got an empty one");
  local().hooks.push_back(std::make_shared<const SavedTensorHooks>(std::move(hooks)));
}
SavedTensorHooksGuard::~SavedTensorHooksGuard() {
  local().hooks.pop_back();
}

}  // namespace cairn::autograd
