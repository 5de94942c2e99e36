#include "backward.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_set>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/function.h"
#include "cairn/core/error.h"
#include "cairn/libtorch/tensors.h"
#include "model_impl.h"

namespace cairn::libtorch {

using autograd::Context;
using autograd::Tensors;

namespace {

/// The calling thread runs all of libtorch's backward: Cairn's run is this thread's.
class OneThread {
 public:
  OneThread() : before_(state().get_multithreading_enabled()) {
    state().set_multithreading_enabled(false);
  }
  ~OneThread() { state().set_multithreading_enabled(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  bool before_;
};

struct LibtorchBackward {
  static constexpr autograd::OpInfo kInfo{"libtorch"};
  torch::Tensor loss;
  std::vector<Model*> models;
  bool retain_graph;
  std::size_t inputs;

  Tensor forward(Context&, const Tensors&) {
    return to_cairn(loss.detach().to(at::kFloat).clone());
  }

  /// Every gradient lands by way of on_gradient(): nothing is left to hand on.
  Tensors backward(Context&, const Tensor& dy) {
    for (const Model* model : models) model->impl().place_gradients();
    const OneThread one_thread;
    const torch::Tensor scale = to_torch(dy).reshape(loss.sizes()).to(loss.scalar_type());
    torch::autograd::backward({loss}, {scale}, retain_graph);
    return Tensors(inputs);
  }
};

struct GradientLanding {
  static constexpr autograd::OpInfo kInfo{"libtorch_gradient"};
  torch::Tensor gradient;
  Tensor* landed;

  Tensor forward(Context&, const Tensor& parameter) {
    return Tensor::zeros({1}, DType::f32, parameter.device());
  }

  Tensors backward(Context& ctx, const Tensor&) {
    const auto [slot, accumulate] = ctx.grad_target(0);
    *landed = slot;
    if (gradient.data_ptr() == slot.raw_data()) return {slot};  // libtorch has added to it
    const torch::NoGradGuard no_grad;
    torch::Tensor target = to_torch(slot);
    if (accumulate) {
      target.add_(gradient);
    } else {
      target.copy_(gradient);
    }
    return {slot};
  }
};

/// Leaves that a graph of libtorch's ends in.
class Leaves {
 public:
  explicit Leaves(const torch::Tensor& loss) {
    if (loss.grad_fn()) visit(loss.grad_fn().get());
    while (!stack_.empty()) {
      const torch::autograd::Node* node = stack_.back();
      stack_.pop_back();
      for (const auto& edge : node->next_edges()) {
        if (edge.is_valid()) visit(edge.function.get());
      }
    }
  }
  bool contain(const torch::Tensor& x) const { return leaves_.contains(x.unsafeGetTensorImpl()); }

 private:
  void visit(const torch::autograd::Node* node) {
    if (!seen_.insert(node).second) return;
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      leaves_.insert(leaf->variable.unsafeGetTensorImpl());
    } else {
      stack_.push_back(node);
    }
  }

  std::vector<const torch::autograd::Node*> stack_;
  std::unordered_set<const torch::autograd::Node*> seen_;
  std::unordered_set<const at::TensorImpl*> leaves_;
};

}  // namespace

Tensor loss_of(const torch::Tensor& loss, const std::vector<Model*>& models, bool retain_graph) {
  CAIRN_CHECK(loss.defined() && loss.numel() == 1 && loss.is_floating_point(), "backward",
              "expected a loss of one floating element, got ",
              loss.defined() ? core::str(loss.sizes(), " ", loss.dtype()) : "an undefined tensor");
  const Leaves leaves(loss);
  Tensors reached;
  for (const Model* model : models) {
    for (const auto& parameter : model->impl().parameters) {
      if (leaves.contain(parameter.theirs)) reached.push_back(parameter.ours);
    }
  }
  CAIRN_CHECK(!reached.empty(), "backward",
              "expected a loss that depends on a parameter of the model, got one that depends on ",
              "none (was it made under no_grad, or by another module?)");
  const std::size_t count = reached.size();
  return autograd::apply_list(LibtorchBackward{loss, models, retain_graph, count},
                              std::move(reached));
}

Tensor land_gradient(const Tensor& parameter, const torch::Tensor& gradient) {
  CAIRN_CHECK(autograd::in_backward(), "libtorch", "expected a backward of Cairn's for '",
              parameter.name(), "', got a plain loss.backward() (precision.backward(loss), or ",
              "model.backward(loss) without amp)");
  Tensor landed;
  const autograd::GradModeGuard recording(true);
  autograd::backward(autograd::apply(GradientLanding{gradient, &landed}, parameter));
  return landed;
}

FollowedBackward::FollowedBackward(const std::vector<Model*>& models) : models_(models) {
  for (const Model* model : models_) model->impl().pull_foreign_changes();
  for (const Model* model : models_) model->impl().sees_gradients = true;
}

FollowedBackward::~FollowedBackward() {
  for (const Model* model : models_) {
    Model::Impl& impl = model->impl();
    impl.sees_gradients = false;
    impl.place_gradients();
    impl.writes.remember(impl.parameters_waiting());
  }
}

void Model::backward(const torch::Tensor& loss, bool retain_graph) {
  const std::vector<Model*> models{this};
  const FollowedBackward followed(models);
  autograd::backward(loss_of(loss, models, retain_graph));
}

void Model::backward(const Tensor& loss) {
  const std::vector<Model*> models{this};
  const FollowedBackward followed(models);
  autograd::backward(loss);
}

}  // namespace cairn::libtorch
