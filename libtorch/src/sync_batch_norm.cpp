#include "cairn/libtorch/sync_batch_norm.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/libtorch/tensors.h"
#include "cairn/parallel/sync_batch_norm.h"

namespace cairn::libtorch {

namespace {

/// The layer as Cairn's graph, from forward to backward.
struct Recorded : torch::CustomClassHolder {
  Tensor x, weight, bias, y;
};

Tensor leaf_of(const torch::Tensor& x) {
  if (!x.defined()) return {};
  Tensor leaf = to_cairn(x.detach());
  leaf.set_requires_grad(true);
  return leaf;
}

torch::Tensor gradient_of(const Tensor& leaf) {
  return leaf.defined() && leaf.grad().defined() ? to_torch(leaf.grad()) : torch::Tensor();
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight, const torch::Tensor& bias,
                               const torch::Tensor& mean, const torch::Tensor& var,
                               const autograd::BatchNormOptions& options,
                               const parallel::ProcessGroup& group) {
    auto recorded = c10::make_intrusive<Recorded>();
    recorded->x = leaf_of(x);
    recorded->weight = leaf_of(weight);
    recorded->bias = leaf_of(bias);
    const autograd::GradModeGuard recording(true);
    recorded->y = parallel::sync_batch_norm(recorded->x, recorded->weight, recorded->bias,
                                            to_cairn(mean), to_cairn(var), options, group);
    context->saved_data["recorded"] = c10::IValue::make_capsule(recorded);
    return to_torch(recorded->y);
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               const torch::autograd::tensor_list& dy) {
    const auto recorded =
        c10::static_intrusive_pointer_cast<Recorded>(context->saved_data["recorded"].toCapsule());
    const torch::Tensor gradient = dy[0].contiguous(dy[0].suggest_memory_format());
    autograd::backward(recorded->y, to_cairn(gradient));
    return {gradient_of(recorded->x),
            gradient_of(recorded->weight),
            gradient_of(recorded->bias),
            {},
            {},
            {},
            {}};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& o,
                                     parallel::ProcessGroup group)
    : options(o), group_(std::move(group)) {
  CAIRN_CHECK(options.track_running_stats() && options.momentum(), "SyncBatchNorm",
              "expected options with track_running_stats and a momentum, got some without");
  const std::int64_t channels = options.num_features();
  if (options.affine()) {
    weight = register_parameter("weight", torch::ones({channels}));
    bias = register_parameter("bias", torch::zeros({channels}));
  }
  running_mean = register_buffer("running_mean", torch::zeros({channels}));
  running_var = register_buffer("running_var", torch::ones({channels}));
  num_batches_tracked = register_buffer("num_batches_tracked", torch::zeros({}, torch::kLong));
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& x) {
  if (x.dim() == 3) return forward(x.unsqueeze(3)).squeeze(3);
  if (is_training() && !autograd::recomputing()) num_batches_tracked += 1;
  return SyncBatchNormFunction::apply(
      x.contiguous(x.suggest_memory_format()), weight, bias, running_mean, running_var,
      autograd::BatchNormOptions{
          .training = is_training(), .eps = options.eps(), .momentum = *options.momentum()},
      group_);
}

}  // namespace cairn::libtorch
