// matmul and linear.
#include "cairn/kernels/matmul.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::MatmulOptions;

namespace {

Shape product_shape(const Shape& a, const Shape& b) {
  CAIRN_CHECK(a.dims() >= 2 && b.dims() >= 2, "matmul",
              "expected matrices [..., M, K] and [..., K, N], got ", a, " and ", b,
              " (reshape a vector to a matrix)");
  Shape shape = core::broadcast_shapes(Shape(a.begin(), a.end() - 2), Shape(b.begin(), b.end() - 2),
                                       "matmul");
  shape.push_back(a[a.dims() - 2]);
  shape.push_back(b.back());
  return shape;
}

// a b, where the input's gradient goes. What broadcasting repeated is summed.
Tensor gradient_product(Context& ctx, int input, const TensorView& a, const TensorView& b) {
  const Shape shape = product_shape(a.shape, b.shape);
  if (shape == ctx.input_shape(input)) {
    const GradTarget target = ctx.grad_target(input);
    kernels::matmul(a, b, target.tensor, {.accumulate = target.accumulate});
    return target.tensor;
  }
  const Tensor whole = Tensor::empty(shape, a.dtype, a.device);
  kernels::matmul(a, b, whole);
  return sum_to_input(ctx, input, whole);
}

struct Matmul {
  static constexpr OpInfo kInfo{"matmul", CastPolicy::half};

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    const Shape shape = product_shape(a.shape(), b.shape());
    ctx.save(ctx.needs_grad(1) ? a : Tensor());
    ctx.save(ctx.needs_grad(0) ? b : Tensor());
    Tensor y = empty_as(a, shape, a.dtype());
    kernels::matmul(a, b, y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = gradient_product(ctx, 0, dy, ctx.saved(1).view().transpose(-2, -1));
    }
    if (ctx.needs_grad(1)) gradients[1] = second(ctx, ctx.saved(0), dy);
    return gradients;
  }

 private:
  // A matrix b that a's leading dimensions share: they become rows, and no sum is needed after.
  static Tensor second(Context& ctx, const Tensor& a, const Tensor& dy) {
    const bool shared = ctx.input_shape(1).dims() == 2 && a.dims() > 2;
    if (!shared) return gradient_product(ctx, 1, a.view().transpose(-2, -1), dy);
    return gradient_product(ctx, 1, as_matrix(a).view().transpose(0, 1), as_matrix(dy));
  }
};

struct Linear {
  static constexpr OpInfo kInfo{"linear", CastPolicy::half};
  Activation activation;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    check(x, weight, bias);
    const Tensor rows = as_matrix(x);
    ctx.save(ctx.needs_grad(1) ? rows : Tensor());
    ctx.save(ctx.needs_grad(0) ? weight : Tensor());
    const Shape flat{rows.size(0), weight.size(0)};
    const Tensor y = empty_as(x, flat, x.dtype());
    MatmulOptions options{.activation = activation};
    if (bias.defined()) options.bias = bias;
    Tensor pre;
    const bool gelu = activation == Activation::gelu || activation == Activation::gelu_tanh;
    if (gelu && ctx.recording()) {
      pre = empty_as(x, flat, x.dtype());
      options.pre_activation = pre;
    }
    kernels::matmul(rows, weight.view().transpose(0, 1), y, options);
    ctx.save(activation == Activation::relu ? y : pre);
    Shape shape = x.shape();
    shape[shape.dims() - 1] = weight.size(0);
    return y.alias(y.view().reshape(shape));
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensor dz = as_matrix(dy);
    if (activation != Activation::none) {
      const Tensor saved = ctx.saved(2);
      const Tensor through = Tensor::empty_like(saved);
      kernels::unary_backward(kernels::unary_of(activation), saved, dz, through);
      dz = through;
    }
    Tensors gradients(3);
    if (ctx.needs_grad(0)) gradients[0] = input_gradient(ctx, dz);
    if (ctx.needs_grad(1)) {
      gradients[1] = gradient_product(ctx, 1, dz.view().transpose(0, 1), ctx.saved(0));
    }
    if (ctx.needs_grad(2)) gradients[2] = sum_to_input(ctx, 2, dz);
    return gradients;
  }

 private:
  static void check(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    CAIRN_CHECK(weight.defined() && weight.dims() == 2, kInfo.name, "expected weight [O, I], got ",
                weight.defined() ? core::str(weight.shape()) : "none");
    CAIRN_CHECK(x.dims() >= 1 && x.size(-1) == weight.size(1), kInfo.name, "expected x [..., ",
                weight.size(1), "] for weight ", weight.shape(), ", got ", x.shape());
    const bool fits = !bias.defined() || bias.shape() == Shape{weight.size(0)};
    CAIRN_CHECK(fits, kInfo.name, "expected bias [", weight.size(0), "], got ", bias.shape());
  }

  static Tensor input_gradient(Context& ctx, const Tensor& dz) {
    const Tensor weight = ctx.saved(1);
    const Shape& shape = ctx.input_shape(0);
    if (shape.dims() == 2) return gradient_product(ctx, 0, dz, weight);
    const Tensor dx = empty_as(dz, {dz.size(0), weight.size(1)}, dz.dtype());
    kernels::matmul(dz, weight, dx);
    return dx.alias(dx.view().reshape(shape));
  }
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  return apply(Matmul{}, a, b);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation) {
  return apply(Linear{activation}, x, weight, bias);
}

}  // namespace cairn::autograd
