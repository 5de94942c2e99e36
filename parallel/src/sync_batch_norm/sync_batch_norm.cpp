#include "cairn/parallel/sync_batch_norm.h"

#include <utility>

#include "cairn/autograd/function.h"
#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::parallel {

using autograd::Context;
using autograd::GradTarget;
using autograd::Tensors;

namespace {

TensorView view_or_none(const Tensor& x) {
  return x.defined() ? x.view() : TensorView();
}

Tensor channels_of(const Tensor& x, std::int64_t count) {
  return Tensor::empty({count}, DType::f32, x.device());
}

struct SyncBatchNormOp {
  static constexpr autograd::OpInfo kInfo{"sync_batch_norm"};
  autograd::BatchNormOptions options;
  ProcessGroup group;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& running_mean, const Tensor& running_var) {
    CAIRN_CHECK(x.dims() == 2 || x.dims() == 4, kInfo.name,
                "expected x [N, C] or [N, C, H, W], got ", x.shape());
    const std::int64_t channels = x.size(1);
    const Tensor parts = gather_moments(x);
    const Tensor mean = channels_of(x, channels), var = channels_of(x, channels);
    const Tensor rstd = channels_of(x, channels), count = channels_of(x, 1);
    const bool tracks = running_mean.defined() && !autograd::recomputing();
    kernels::batch_norm_merge(parts, tracks ? running_mean.view() : TensorView(),
                              tracks ? running_var.view() : TensorView(), mean, var, rstd, count,
                              options);
    Tensor y = Tensor::empty_like(x);
    kernels::batch_norm_eval(x, view_or_none(weight), view_or_none(bias), mean, var, y, options);
    for (const Tensor& saved : {x, options.relu ? y : Tensor(), weight, mean, rstd, count}) {
      ctx.save(saved);
    }
    return y;
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), y = ctx.saved(1), weight = ctx.saved(2);
    const Tensor mean = ctx.saved(3), rstd = ctx.saved(4), count = ctx.saved(5);
    const std::int64_t channels = x.size(1);
    // Sums of g and of g xhat, which are the gradients of bias and weight.
    const Tensor sums = channels_of(x, 2 * channels);
    const TensorView dbias = sums.view().slice(0, 0, channels);
    const TensorView dweight = sums.view().slice(0, channels, 2 * channels);
    kernels::batch_norm_backward(x, view_or_none(y), view_or_none(weight), mean, rstd, dy, {},
                                 dweight, dbias, options);
    Tensors gradients(5);
    gradients[1] = land(ctx, 1, dweight);
    gradients[2] = land(ctx, 2, dbias);
    if (!ctx.needs_grad(0)) return gradients;
    group.all_reduce(sums, ReduceOp::sum, kInfo.name);
    if (x.numel() > 0) kernels::binary(kernels::BinaryOp::div, sums, count, sums);
    gradients[0] = Tensor::empty_like(x);
    kernels::batch_norm_backward_data(x, view_or_none(y), view_or_none(weight), mean, rstd, dy,
                                      dbias, dweight, gradients[0], options);
    return gradients;
  }

 private:
  /// [ranks, 2 C + 1].
  Tensor gather_moments(const Tensor& x) const {
    const Tensor part = channels_of(x, 2 * x.size(1) + 1);
    kernels::batch_norm_moments(x, part);
    Tensor parts = Tensor::empty({group.world_size(), part.numel()}, DType::f32, x.device());
    group.all_gather(part, parts, kInfo.name);
    // Ranks with more than one value of their own know that there are enough, and wait for nothing.
    if (x.size(1) > 0 && x.numel() <= x.size(1)) check_count(x, parts);
    return parts;
  }

  static void check_count(const Tensor& x, const Tensor& parts) {
    const std::int64_t last = parts.size(1) - 1;
    double count = 0.0;
    for (const double n : parts.alias(parts.view().select(1, last)).to_vector()) count += n;
    CAIRN_CHECK(count != 1.0, kInfo.name,
                "expected more than one value per channel to train on over all ranks, got one; x ",
                x.shape(), " here (larger batches, or evaluation mode)");
  }

  static Tensor land(Context& ctx, int input, const TensorView& gradient) {
    if (!ctx.needs_grad(input)) return {};
    const GradTarget target = ctx.grad_target(input);
    kernels::axpby(1.0, gradient, target.accumulate ? 1.0 : 0.0, target.tensor);
    return target.tensor;
  }
};

nn::BatchNorm::Function over(const ProcessGroup& group) {
  return
      [group](const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
              const Tensor& running_var, const autograd::BatchNormOptions& options) {
        return sync_batch_norm(x, weight, bias, running_mean, running_var, options, group);
      };
}

}  // namespace

Tensor sync_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const Tensor& running_mean, const Tensor& running_var,
                       const autograd::BatchNormOptions& options, const ProcessGroup& group) {
  CAIRN_CHECK(running_mean.defined() == running_var.defined(), "sync_batch_norm",
              "expected both running statistics or none, got one");
  if (!options.training) {
    return autograd::batch_norm(x, weight, bias, running_mean, running_var, options);
  }
  return autograd::apply(SyncBatchNormOp{options, group}, x, weight, bias, running_mean,
                         running_var);
}

SyncBatchNorm::SyncBatchNorm(std::int64_t channels, ProcessGroup group,
                             const nn::BatchNormOptions& options)
    : BatchNorm(channels, 2, 5, options), group_(std::move(group)) {
  set_training_function(over(group_));
}

Tensor SyncBatchNorm::forward(const Tensor& x, const Tensor& z) {
  const Tensor y = normalise(x, false);
  return options_.relu ? autograd::add_relu(y, z) : y + z;
}

std::shared_ptr<nn::Module> SyncBatchNorm::make_like() const {
  return std::make_shared<SyncBatchNorm>(channels(), group_, options_);
}

int convert_sync_batch_norm(nn::Module& model, const ProcessGroup& group) {
  int converted = 0;
  for (const auto& [name, module] : model.modules()) {
    auto* norm = dynamic_cast<nn::BatchNorm*>(module);
    if (norm == nullptr) continue;
    norm->set_training_function(over(group));
    ++converted;
  }
  return converted;
}

}  // namespace cairn::parallel
