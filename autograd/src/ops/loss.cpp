// Losses by element. The kernels give one f32 loss (f64 for f64) an element; the reductions happen
// here.
#include "cairn/kernels/loss.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::BinaryOp;
using kernels::ReduceOp;

namespace {

struct Mse {
  static constexpr OpInfo kInfo{"mse_loss", CastPolicy::f32};
  static void forward_kernel(const TensorView& x, const TensorView& t, const TensorView& loss) {
    kernels::mse(x, t, loss);
  }
  static void backward_kernel(const TensorView& x, const TensorView& t, const TensorView& dloss,
                              const TensorView& dx) {
    kernels::mse_backward(x, t, dloss, dx);
  }
  // d/dt (x - t)^2 = -d/dx.
  static void target_gradient(const TensorView& x, const TensorView& t, const TensorView& dloss,
                              const TensorView& dt) {
    kernels::mse_backward(t, x, dloss, dt);
  }
};

struct BceWithLogits {
  static constexpr OpInfo kInfo{"bce_with_logits", CastPolicy::f32};
  static void forward_kernel(const TensorView& x, const TensorView& t, const TensorView& loss) {
    kernels::bce_with_logits(x, t, loss);
  }
  static void backward_kernel(const TensorView& x, const TensorView& t, const TensorView& dloss,
                              const TensorView& dx) {
    kernels::bce_with_logits_backward(x, t, dloss, dx);
  }
  // d/dt (... - x t ...) = -x.
  static void target_gradient(const TensorView& x, const TensorView&, const TensorView& dloss,
                              const TensorView& dt) {
    kernels::affine(dloss, -1.0, 0.0, dt);
    kernels::binary(BinaryOp::mul, dt, x, dt);
  }
};

struct Bce {
  static constexpr OpInfo kInfo{
      "binary_cross_entropy", CastPolicy::banned,
      "half probabilities round to 0 and 1, where the logarithms are infinite: leave the sigmoid "
      "out and use bce_with_logits, or compute the sigmoid in f32"};
  static void forward_kernel(const TensorView& p, const TensorView& t, const TensorView& loss) {
    kernels::bce(p, t, loss);
  }
  static void backward_kernel(const TensorView& p, const TensorView& t, const TensorView& dloss,
                              const TensorView& dp) {
    kernels::bce_backward(p, t, dloss, dp);
  }
  // The loss is linear in t: its derivative is loss(p, 1) - loss(p, 0).
  static void target_gradient(const TensorView& p, const TensorView& t, const TensorView& dloss,
                              const TensorView& dt) {
    const Tensor constant = Tensor::full(t.shape, 1.0, t.dtype, t.device);
    const Tensor one = Tensor::empty(t.shape, wide(t.dtype), t.device);
    const Tensor zero = Tensor::empty_like(one);
    kernels::bce(p, constant, one);
    kernels::fill(constant, 0.0);
    kernels::bce(p, constant, zero);
    kernels::axpby(-1.0, zero, 1.0, one);
    kernels::binary(BinaryOp::mul, one, dloss, one);
    kernels::copy(one, dt);
  }
};

template <class Loss>
struct Elementwise {
  static constexpr OpInfo kInfo = Loss::kInfo;
  Reduction reduction;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& target) {
    CAIRN_CHECK(target.defined() && x.shape() == target.shape(), kInfo.name,
                "expected x and target of one shape, got ", x.shape(), " and ",
                target.defined() ? core::str(target.shape()) : "none");
    Tensor losses = empty_as(x, x.shape(), wide(x.dtype()));
    Loss::forward_kernel(x, target, losses);
    ctx.save(x);
    ctx.save(target);
    if (reduction == Reduction::none) return losses;
    return total(reduction == Reduction::mean ? ReduceOp::mean : ReduceOp::sum, losses);
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), target = ctx.saved(1);
    Tensor weight = dy;
    if (reduction == Reduction::mean) {
      weight = empty_as(dy, {}, dy.dtype());
      kernels::affine(dy, 1.0 / static_cast<double>(x.numel()), 0.0, weight);
    }
    const TensorView dloss = weight.view().expand(x.shape());
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = Tensor::empty_like(x);
      Loss::backward_kernel(x, target, dloss, gradients[0]);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = Tensor::empty_like(target);
      Loss::target_gradient(x, target, dloss, gradients[1]);
    }
    return gradients;
  }
};

}  // namespace

namespace {
// A half result of a model against an f32 target is the usual case: outside of an autocast region, which
// casts by policy, both are taken in the wider dtype.
template <class Loss>
Tensor elementwise_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  const bool differ = x.defined() && target.defined() && x.dtype() != target.dtype();
  const bool floating = differ && core::is_floating(x.dtype()) && core::is_floating(target.dtype());
  if (!floating || autocast_state().enabled) return apply(Elementwise<Loss>{reduction}, x, target);
  const DType wider = core::promote(x.dtype(), target.dtype());
  return apply(Elementwise<Loss>{reduction}, to(x, wider), to(target, wider));
}
}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  return elementwise_loss<Mse>(x, target, reduction);
}
Tensor bce_with_logits(const Tensor& x, const Tensor& target, Reduction reduction) {
  return elementwise_loss<BceWithLogits>(x, target, reduction);
}
Tensor binary_cross_entropy(const Tensor& p, const Tensor& target, Reduction reduction) {
  return elementwise_loss<Bce>(p, target, reduction);
}

}  // namespace cairn::autograd
