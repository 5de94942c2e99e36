// layer_norm, rms_norm, group_norm, batch_norm.
#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/layer_norm.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::BinaryOp;

namespace {

// Where the gradients of a norm's weight and bias go. The kernels add to both or to none: where the
// two differ, they write aside and settle() adds.
class AffineGradients {
 public:
  AffineGradients(Context& ctx, int weight, int bias) {
    if (ctx.needs_grad(weight)) weight_ = ctx.grad_target(weight);
    if (ctx.needs_grad(bias)) bias_ = ctx.grad_target(bias);
    const bool both = weight_.tensor.defined() && bias_.tensor.defined();
    apart_ = both && weight_.accumulate != bias_.accumulate;
    if (apart_) {
      dweight_ = Tensor::empty_like(weight_.tensor);
      dbias_ = Tensor::empty_like(bias_.tensor);
    } else {
      dweight_ = weight_.tensor;
      dbias_ = bias_.tensor;
    }
  }
  TensorView dweight() const { return view_or_none(dweight_); }
  TensorView dbias() const { return view_or_none(dbias_); }
  bool accumulate() const { return !apart_ && (weight_.accumulate || bias_.accumulate); }

  /// After the kernel: into gradients[1] and gradients[2].
  void settle(Tensors& gradients) const {
    gradients[1] = weight_.tensor;
    if (gradients.size() > 2) gradients[2] = bias_.tensor;
    if (!apart_) return;
    kernels::axpby(1.0, dweight_, weight_.accumulate ? 1.0 : 0.0, weight_.tensor);
    kernels::axpby(1.0, dbias_, bias_.accumulate ? 1.0 : 0.0, bias_.tensor);
  }

 private:
  GradTarget weight_, bias_;
  Tensor dweight_, dbias_;
  bool apart_ = false;
};

Tensor statistics(const Tensor& x, std::int64_t count) {
  return empty_as(x, {count}, wide(x.dtype()));
}

Tensor in_shape(const Tensor& matrix, const Shape& shape) {
  return matrix.alias(matrix.view().reshape(shape));
}

struct LayerNorm {
  static constexpr OpInfo kInfo{"layer_norm", CastPolicy::f32};
  double eps;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const Tensor rows = as_matrix(x);
    const Tensor y = empty_as(x, rows.shape(), x.dtype());
    const Tensor mean = statistics(x, rows.size(0)), rstd = statistics(x, rows.size(0));
    kernels::layer_norm(rows, view_or_none(weight), view_or_none(bias), eps, y, mean, rstd);
    for (const Tensor& saved : {rows, weight, mean, rstd}) ctx.save(saved);
    return in_shape(y, x.shape());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), dx = empty_as(x, x.shape(), x.dtype());
    const AffineGradients affine(ctx, 1, 2);
    kernels::layer_norm_backward(x, view_or_none(ctx.saved(1)), ctx.saved(2), ctx.saved(3),
                                 as_matrix(dy), ctx.needs_grad(0) ? dx.view() : TensorView(),
                                 affine.dweight(), affine.dbias(), affine.accumulate());
    Tensors gradients(3);
    affine.settle(gradients);
    if (ctx.needs_grad(0)) gradients[0] = in_shape(dx, ctx.input_shape(0));
    return gradients;
  }
};

struct RmsNorm {
  static constexpr OpInfo kInfo{"rms_norm", CastPolicy::f32};
  double eps;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight) {
    const Tensor rows = as_matrix(x);
    const Tensor y = empty_as(x, rows.shape(), x.dtype());
    const Tensor rstd = statistics(x, rows.size(0));
    kernels::rms_norm(rows, view_or_none(weight), eps, y, rstd);
    for (const Tensor& saved : {rows, weight, rstd}) ctx.save(saved);
    return in_shape(y, x.shape());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), dx = empty_as(x, x.shape(), x.dtype());
    GradTarget target;
    if (ctx.needs_grad(1)) target = ctx.grad_target(1);
    kernels::rms_norm_backward(x, view_or_none(ctx.saved(1)), ctx.saved(2), as_matrix(dy),
                               ctx.needs_grad(0) ? dx.view() : TensorView(),
                               view_or_none(target.tensor), target.accumulate);
    Tensors gradients{{}, target.tensor};
    if (ctx.needs_grad(0)) gradients[0] = in_shape(dx, ctx.input_shape(0));
    return gradients;
  }
};

// Rows of one group each go through the layer norm's kernels; weight and bias are per channel.
struct GroupNorm {
  static constexpr OpInfo kInfo{"group_norm", CastPolicy::f32};
  std::int64_t groups;
  double eps;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    check(x, weight, bias);
    const Tensor rows = in_groups(contiguous_data(x));
    const Tensor normal = Tensor::empty_like(rows);
    const Tensor mean = statistics(x, rows.size(0)), rstd = statistics(x, rows.size(0));
    kernels::layer_norm(rows, {}, {}, eps, normal, mean, rstd);
    for (const Tensor& saved : {rows, mean, rstd, weight}) ctx.save(saved);
    ctx.save(ctx.needs_grad(1) ? normal : Tensor());
    Tensor y = Tensor::empty_like(x);
    const TensorView as_x = normal.view().reshape(x.shape());
    if (weight.defined()) {
      kernels::binary(BinaryOp::mul, as_x, per_channel(weight, x.dims()), y);
    } else {
      kernels::copy(as_x, y);
    }
    if (bias.defined()) kernels::binary(BinaryOp::add, y, per_channel(bias, x.dims()), y);
    return y;
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(3);
    if (ctx.needs_grad(2)) gradients[2] = channel_sum(ctx, 2, dy);
    if (ctx.needs_grad(1)) {
      const Tensor product = Tensor::empty(dy.shape(), dy.dtype(), dy.device());
      kernels::binary(BinaryOp::mul, dy, ctx.saved(4).view().reshape(dy.shape()), product);
      gradients[1] = channel_sum(ctx, 1, product);
    }
    if (!ctx.needs_grad(0)) return gradients;
    const Tensor weight = ctx.saved(3);
    Tensor dnormal = contiguous_data(dy);
    if (weight.defined()) {
      dnormal = Tensor::empty(dy.shape(), dy.dtype(), dy.device());
      kernels::binary(BinaryOp::mul, dy, per_channel(weight, dy.dims()), dnormal);
    }
    const Tensor rows = ctx.saved(0), dx = Tensor::empty_like(rows);
    kernels::layer_norm_backward(rows, {}, ctx.saved(1), ctx.saved(2), in_groups(dnormal), dx, {},
                                 {}, false);
    gradients[0] = in_shape(dx, dy.shape());
    return gradients;
  }

 private:
  void check(const Tensor& x, const Tensor& weight, const Tensor& bias) const {
    CAIRN_CHECK(x.dims() >= 2 && groups > 0 && x.size(1) % groups == 0, kInfo.name,
                "expected x [N, C, ...] with C a multiple of ", groups, " groups, got ", x.shape());
    for (const Tensor& affine : {weight, bias}) {
      const bool fits = !affine.defined() || affine.shape() == Shape{x.size(1)};
      CAIRN_CHECK(fits, kInfo.name, "expected weight and bias [", x.size(1), "], got ",
                  affine.shape());
    }
  }
  Tensor in_groups(const Tensor& x) const {
    const std::int64_t rows = x.size(0) * groups;
    return in_shape(x, {rows, rows == 0 ? 0 : x.numel() / rows});
  }
  static TensorView per_channel(const Tensor& values, int dims) {
    Shape shape{1, values.size(0)};
    for (int d = 2; d < dims; ++d) shape.push_back(1);
    return values.view().reshape(shape);
  }
  // Over all but the channels, where the input's gradient goes.
  static Tensor channel_sum(Context& ctx, int input, const Tensor& x) {
    const GradTarget target = ctx.grad_target(input);
    kernels::reduce(kernels::ReductionKind::sum, x, per_channel(target.tensor, x.dims()),
                    target.accumulate);
    return target.tensor;
  }
};

struct BatchNorm {
  static constexpr OpInfo kInfo{"batch_norm"};
  BatchNormOptions options;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& running_mean, const Tensor& running_var) {
    CAIRN_CHECK(x.dims() == 2 || x.dims() == 4, kInfo.name,
                "expected x [N, C] or [N, C, H, W], got ", x.shape());
    Tensor y = Tensor::empty_like(x);
    Tensor mean, rstd;
    if (options.training) {
      mean = empty_as(x, {x.size(1)}, DType::f32), rstd = Tensor::empty_like(mean);
      train(x, weight, bias, running_mean, running_var, y, mean, rstd);
    } else {
      CAIRN_CHECK(running_mean.defined() && running_var.defined(), kInfo.name,
                  "expected running statistics in evaluation, got none (use training = true)");
      kernels::batch_norm_eval(x, view_or_none(weight), view_or_none(bias), running_mean,
                               running_var, y, options);
      if (ctx.recording()) {
        mean = copied(running_mean, 0.0);
        rstd = copied(running_var, options.eps);
        kernels::unary(kernels::UnaryOp::rsqrt, rstd, rstd);
      }
    }
    for (const Tensor& saved : {x, options.relu ? y : Tensor(), weight, mean, rstd}) {
      ctx.save(saved);
    }
    return y;
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), dx = Tensor::empty_like(x);
    const AffineGradients affine(ctx, 1, 2);
    kernels::batch_norm_backward(x, view_or_none(ctx.saved(1)), view_or_none(ctx.saved(2)),
                                 ctx.saved(3), ctx.saved(4), dy, dx, affine.dweight(),
                                 affine.dbias(), options, affine.accumulate());
    Tensors gradients(5);
    affine.settle(gradients);
    if (ctx.needs_grad(0)) gradients[0] = dx;
    return gradients;
  }

 private:
  // A replay sees the same batch a second time: the running statistics have counted it already.
  void train(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
             const Tensor& running_var, const Tensor& y, const Tensor& mean,
             const Tensor& rstd) const {
    const std::int64_t C = x.size(1);
    CAIRN_CHECK(C == 0 || x.numel() != C, kInfo.name,
                "expected more than one value per channel in training, got ", x.shape());
    const bool tracks = running_mean.defined() && !recomputing();
    kernels::batch_norm(x, view_or_none(weight), view_or_none(bias),
                        tracks ? running_mean.view() : TensorView(),
                        tracks ? running_var.view() : TensorView(), y, mean, rstd, options);
  }

  static Tensor copied(const Tensor& x, double shift) {
    Tensor y = empty_as(x, x.shape(), DType::f32);
    kernels::affine(x, 1.0, shift, y);
    return y;
  }
};

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return apply(LayerNorm{eps}, x, weight, bias);
}
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return apply(RmsNorm{eps}, x, weight);
}
Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias,
                  double eps) {
  return apply(GroupNorm{groups, eps}, x, weight, bias);
}
Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Tensor& running_mean, const Tensor& running_var,
                  const BatchNormOptions& options) {
  CAIRN_CHECK(running_mean.defined() == running_var.defined(), "batch_norm",
              "expected both running statistics or none, got one");
  return apply(BatchNorm{options}, x, weight, bias, running_mean, running_var);
}

}  // namespace cairn::autograd
