// conv2d and conv_transpose2d. Results lie channels-last.
#include "cairn/kernels/conv.h"

#include <algorithm>

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::Conv2dOptions;

namespace {

Tensor empty_channels_last(const Tensor& x, const Shape& shape) {
  return Tensor::empty_strided(shape, core::channels_last_strides(shape), x.dtype(), x.device());
}

// dbias[C] (+)= sum of dy over all but the channels.
Tensor bias_gradient(Context& ctx, int input, const Tensor& dy) {
  const GradTarget target = ctx.grad_target(input);
  const TensorView as_image = target.tensor.view().reshape({1, dy.size(1), 1, 1});
  kernels::reduce(kernels::ReduceOp::sum, dy, as_image, target.accumulate);
  return target.tensor;
}

struct Conv2d {
  static constexpr OpInfo kInfo{"conv2d", CastPolicy::half};
  Conv2dOptions options;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const Shape shape = kernels::conv2d_shape(x.shape(), weight.shape(), options);
    ctx.save(ctx.needs_grad(1) ? x : Tensor());
    ctx.save(ctx.needs_grad(0) ? weight : Tensor());
    Tensor y = empty_channels_last(x, shape);
    kernels::conv2d(x, weight, view_or_none(bias), y, options);
    return y;
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      const Tensor dx = empty_channels_last(dy, ctx.input_shape(0));
      kernels::conv2d_backward_data(dy, ctx.saved(1), {}, dx, options);
      gradients[0] = dx;
    }
    if (ctx.needs_grad(1)) weight_gradients(ctx, dy, gradients);
    if (ctx.needs_grad(2) && !gradients[2].defined()) gradients[2] = bias_gradient(ctx, 2, dy);
    return gradients;
  }

 private:
  // Both in one pass, unless one is to be overwritten and the other to be added to.
  void weight_gradients(Context& ctx, const Tensor& dy, Tensors& gradients) const {
    const GradTarget dweight = ctx.grad_target(1);
    gradients[1] = dweight.tensor;
    TensorView dbias;
    Tensor apart;
    if (ctx.needs_grad(2)) {
      const GradTarget target = ctx.grad_target(2);
      gradients[2] = target.tensor;
      dbias = target.tensor;
      if (target.accumulate != dweight.accumulate) {
        apart = Tensor::zeros(target.tensor.shape(), target.tensor.dtype(), dy.device());
        dbias = apart;
      }
      if (apart.defined() && !target.accumulate) kernels::fill(target.tensor, 0.0);
    }
    kernels::conv2d_backward_weight(ctx.saved(0), dy, dweight.tensor, dbias, options,
                                    dweight.accumulate);
    if (apart.defined()) kernels::axpby(1.0, apart, 1.0, gradients[2]);
  }
};

// y takes the place of a convolution's input, x of its output.
struct ConvTranspose2d {
  static constexpr OpInfo kInfo{"conv_transpose2d", CastPolicy::half};
  Conv2dOptions options;
  std::array<std::int64_t, 2> output_padding;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const Shape shape = output_shape(x.shape(), weight.shape());
    ctx.save(ctx.needs_grad(1) ? x : Tensor());
    ctx.save(ctx.needs_grad(0) ? weight : Tensor());
    Tensor y = empty_channels_last(x, shape);
    kernels::conv2d_backward_data(x, weight, view_or_none(bias), y, options);
    return y;
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      const Tensor dx = empty_channels_last(dy, ctx.input_shape(0));
      kernels::conv2d(dy, ctx.saved(1), {}, dx, options);
      gradients[0] = dx;
    }
    if (ctx.needs_grad(1)) {
      const GradTarget target = ctx.grad_target(1);
      kernels::conv2d_backward_weight(dy, ctx.saved(0), target.tensor, {}, options,
                                      target.accumulate);
      gradients[1] = target.tensor;
    }
    if (ctx.needs_grad(2)) gradients[2] = bias_gradient(ctx, 2, dy);
    return gradients;
  }

 private:
  Shape output_shape(const Shape& x, const Shape& weight) const {
    CAIRN_CHECK(x.dims() == 4 && weight.dims() == 4 && x[1] == weight[0], kInfo.name,
                "expected x [N, I, H, W] and weight [I, O / groups, kH, kW], got ", x, " and ",
                weight);
    Shape y{x[0], weight[1] * options.groups};
    for (int i = 0; i < 2; ++i) {
      const auto d = static_cast<std::size_t>(i);
      const std::int64_t extra = output_padding[d];
      const std::int64_t limit = std::max(options.stride[d], options.dilation[d]);
      CAIRN_CHECK(extra >= 0 && extra < limit, kInfo.name, "expected output_padding in 0..",
                  limit - 1, " (less than stride or dilation), got ", extra);
      const std::int64_t size = (x[2 + i] - 1) * options.stride[d] - 2 * options.padding[d] +
                                options.dilation[d] * (weight[2 + i] - 1) + extra + 1;
      CAIRN_CHECK(size > 0, kInfo.name, "expected an output of positive size, got ", size,
                  " in dimension ", 2 + i, " for x ", x, " and weight ", weight);
      y.push_back(size);
    }
    return y;
  }
};

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Conv2dOptions& options) {
  return apply(Conv2d{options}, x, weight, bias);
}

Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Conv2dOptions& options, std::array<std::int64_t, 2> output_padding) {
  return apply(ConvTranspose2d{options, output_padding}, x, weight, bias);
}

}  // namespace cairn::autograd
