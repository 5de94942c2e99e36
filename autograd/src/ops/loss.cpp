// Losses by element. The kernels give one f32 loss (f64 for f64) an element; the reductions happen
// here.
#include "cairn/kernels/loss.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::BinaryOp;
using kernels::ReductionKind;

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

// x - t, in the dtype of losses.
Tensor difference(const TensorView& x, const TensorView& t, DType dtype) {
  Tensor d = Tensor::empty(x.shape, dtype, x.device);
  kernels::copy(x, d);
  kernels::axpby(-1.0, t, 1.0, d);
  return d;
}

void clamp_to(double bound, const Tensor& x) {
  kernels::binary(BinaryOp::minimum, x, Tensor::full({}, bound, x.dtype(), x.device()), x);
  kernels::binary(BinaryOp::maximum, x, Tensor::full({}, -bound, x.dtype(), x.device()), x);
}

// Of losses of x - t: dt = -dx.
template <class Loss>
struct OfDifference {
  void target_gradient(const TensorView& x, const TensorView& t, const TensorView& dloss,
                       const TensorView& dt) const {
    static_cast<const Loss&>(*this).backward_kernel(t, x, dloss, dt);
  }
};

struct L1 : OfDifference<L1> {
  static constexpr OpInfo kInfo{"l1_loss", CastPolicy::f32};
  void forward_kernel(const TensorView& x, const TensorView& t, const TensorView& loss) const {
    kernels::unary(kernels::UnaryOp::abs, difference(x, t, loss.dtype), loss);
  }
  void backward_kernel(const TensorView& x, const TensorView& t, const TensorView& dloss,
                       const TensorView& dx) const {
    const Tensor d = difference(x, t, dloss.dtype);
    kernels::unary_backward(kernels::UnaryOp::abs, d, dloss, d);
    kernels::copy(d, dx);
  }
};

// With d = |x - t| and c = min(d, bound): scale c (d - c / 2); the slope is scale times x - t
// within +-bound. smooth_l1: bound = beta, scale = 1 / beta; huber: bound = delta, scale = 1.
template <class Loss>
struct RoundedL1 : OfDifference<Loss> {
  double bound, scale;
  RoundedL1(double b, double s) : bound(b), scale(s) {}
  void forward_kernel(const TensorView& x, const TensorView& t, const TensorView& loss) const {
    const Tensor d = difference(x, t, loss.dtype);
    kernels::unary(kernels::UnaryOp::abs, d, d);
    const Tensor c = Tensor::empty_like(d);
    kernels::copy(d, c);
    clamp_to(bound, c);
    kernels::axpby(-0.5, c, 1.0, d);
    kernels::affine(c, scale, 0.0, c);
    kernels::binary(BinaryOp::mul, c, d, loss);
  }
  void backward_kernel(const TensorView& x, const TensorView& t, const TensorView& dloss,
                       const TensorView& dx) const {
    const Tensor d = difference(x, t, dloss.dtype);
    clamp_to(bound, d);
    kernels::affine(d, scale, 0.0, d);
    kernels::binary(BinaryOp::mul, d, dloss, d);
    kernels::copy(d, dx);
  }
};
struct SmoothL1 : RoundedL1<SmoothL1> {
  static constexpr OpInfo kInfo{"smooth_l1_loss", CastPolicy::f32};
  explicit SmoothL1(double beta) : RoundedL1(beta, 1.0 / beta) {}
};
struct Huber : RoundedL1<Huber> {
  static constexpr OpInfo kInfo{"huber_loss", CastPolicy::f32};
  explicit Huber(double delta) : RoundedL1(delta, 1.0) {}
};

// p (log p - x), where p or its logarithm is the target.
struct KlDiv {
  static constexpr OpInfo kInfo{"kl_div", CastPolicy::f32};
  bool log_target = false;
  void forward_kernel(const TensorView& x, const TensorView& t, const TensorView& loss) const {
    const auto [p, log_p] = distribution(t, loss.dtype);
    kernels::axpby(-1.0, x, 1.0, log_p);
    kernels::binary(BinaryOp::mul, p, log_p, loss);
    kernels::binary(BinaryOp::mask, loss, p, loss);  // 0 log 0 is 0
  }
  void backward_kernel(const TensorView&, const TensorView& t, const TensorView& dloss,
                       const TensorView& dx) const {
    const Tensor p = distribution(t, dloss.dtype).p;
    kernels::binary(BinaryOp::mul, p, dloss, p);
    kernels::affine(p, -1.0, 0.0, dx);
  }
  // log p - x + 1, times p for the logarithm.
  void target_gradient(const TensorView& x, const TensorView& t, const TensorView& dloss,
                       const TensorView& dt) const {
    const auto [p, log_p] = distribution(t, dloss.dtype);
    kernels::axpby(-1.0, x, 1.0, log_p);
    kernels::affine(log_p, 1.0, 1.0, log_p);
    if (log_target) kernels::binary(BinaryOp::mul, log_p, p, log_p);
    kernels::binary(BinaryOp::mul, log_p, dloss, log_p);
    kernels::copy(log_p, dt);
  }

 private:
  struct Distribution {
    Tensor p, log_p;
  };
  Distribution distribution(const TensorView& t, DType dtype) const {
    const Tensor given = Tensor::empty(t.shape, dtype, t.device), other = Tensor::empty_like(given);
    kernels::copy(t, given);
    kernels::unary(log_target ? kernels::UnaryOp::exp : kernels::UnaryOp::log, given, other);
    return log_target ? Distribution{other, given} : Distribution{given, other};
  }
};

template <class Loss>
struct Elementwise {
  static constexpr OpInfo kInfo = Loss::kInfo;
  Loss rule;
  Reduction reduction;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& target) {
    CAIRN_CHECK(target.defined() && x.shape() == target.shape(), kInfo.name,
                "expected x and target of one shape, got ", x.shape(), " and ",
                target.defined() ? core::str(target.shape()) : "none");
    check_mean(kInfo.name, reduction, x.numel(), x.shape());
    Tensor losses = empty_as(x, x.shape(), wide(x.dtype()));
    rule.forward_kernel(x, target, losses);
    ctx.save(x);
    ctx.save(target);
    if (reduction == Reduction::none) return losses;
    return total(reduction == Reduction::mean ? ReductionKind::mean : ReductionKind::sum, losses);
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
      rule.backward_kernel(x, target, dloss, gradients[0]);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = Tensor::empty_like(target);
      rule.target_gradient(x, target, dloss, gradients[1]);
    }
    return gradients;
  }
};

}  // namespace

namespace {
// A half result of a model against an f32 target is the usual case: outside of an autocast region,
// which casts by policy, both are taken in the wider dtype.
template <class Loss>
Tensor elementwise_loss(const Tensor& x, const Tensor& target, Reduction reduction,
                        const Loss& rule = {}) {
  const bool differ = x.defined() && target.defined() && x.dtype() != target.dtype();
  const bool floating = differ && core::is_floating(x.dtype()) && core::is_floating(target.dtype());
  if (!floating || autocast_state().enabled) {
    return apply(Elementwise<Loss>{rule, reduction}, x, target);
  }
  const DType wider = core::promote(x.dtype(), target.dtype());
  return apply(Elementwise<Loss>{rule, reduction}, to(x, wider), to(target, wider));
}
}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  return elementwise_loss<Mse>(x, target, reduction);
}
Tensor l1_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  return elementwise_loss<L1>(x, target, reduction);
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, Reduction reduction, double beta) {
  CAIRN_CHECK(beta > 0, "smooth_l1_loss", "expected beta > 0, got ", beta, " (l1_loss is without)");
  return elementwise_loss(x, target, reduction, SmoothL1(beta));
}
Tensor huber_loss(const Tensor& x, const Tensor& target, Reduction reduction, double delta) {
  CAIRN_CHECK(delta > 0, "huber_loss", "expected delta > 0, got ", delta);
  return elementwise_loss(x, target, reduction, Huber(delta));
}
Tensor kl_div(const Tensor& x, const Tensor& target, Reduction reduction, bool log_target) {
  return elementwise_loss(x, target, reduction, KlDiv{log_target});
}
Tensor bce_with_logits(const Tensor& x, const Tensor& target, Reduction reduction) {
  return elementwise_loss<BceWithLogits>(x, target, reduction);
}
Tensor binary_cross_entropy(const Tensor& p, const Tensor& target, Reduction reduction) {
  return elementwise_loss<Bce>(p, target, reduction);
}

}  // namespace cairn::autograd
