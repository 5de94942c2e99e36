// conv1d, conv2d, conv3d and conv_transpose2d. Results lie channels-last.
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
  kernels::reduce(kernels::ReductionKind::sum, dy, as_image, target.accumulate);
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

constexpr OpInfo kConv1d{"conv1d", CastPolicy::half}, kConv3d{"conv3d", CastPolicy::half};

// [A, B, L] as [A, B, 1, L].
Tensor with_height(const Tensor& x) {
  return reshape(x, {x.size(0), x.size(1), 1, x.size(2)});
}

// x [N, C, D, H, W] as images [N OD, C k, H, W], one for each place of a kernel along the depth:
// the k slices of the depth that it covers there.
struct UnfoldDepth {
  static constexpr OpInfo kInfo{"unfold_depth"};
  std::int64_t kernel, stride, padding, dilation;

  Tensor forward(Context&, const Tensor& x) {
    const Shape shape{x.size(0) * places(x.size(2)), x.size(1) * kernel, x.size(3), x.size(4)};
    Tensor y = empty_channels_last(x, shape);
    if (padding > 0) kernels::fill(y, 0.0);
    for_slices(x, y,
               [](const TensorView& at_x, const TensorView& at_y) { kernels::copy(at_x, at_y); });
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = ctx.new_gradient(0);
    const Tensor sum = Tensor::zeros(dx.shape(), wide(dx.dtype()), dx.device());
    for_slices(sum, dy, [](const TensorView& at_x, const TensorView& at_y) {
      kernels::axpby(1.0, at_y, 1.0, at_x);
    });
    kernels::copy(sum, dx);
    return {dx};
  }

  std::int64_t places(std::int64_t depth) const {
    const std::int64_t last = depth + 2 * padding - dilation * (kernel - 1) - 1;
    return last < 0 ? 0 : last / stride + 1;
  }

 private:
  // For each slice i of the kernel: where x and y have it, [N, places inside of x, C, H, W].
  template <class Visit>
  void for_slices(const Tensor& x, const Tensor& y, const Visit& visit) const {
    const std::int64_t D = x.size(2), all = places(D);
    const TensorView by_depth = x.view().transpose(1, 2);
    const TensorView by_slice =
        y.view().reshape({x.size(0), all, x.size(1), kernel, x.size(3), x.size(4)});
    for (std::int64_t i = 0; i < kernel; ++i) {
      const std::int64_t offset = i * dilation - padding;  // of place 0 in x
      const std::int64_t begin = std::max<std::int64_t>(0, (stride - 1 - offset) / stride);
      const std::int64_t end = std::min(all, offset >= D ? 0 : (D - 1 - offset) / stride + 1);
      if (begin >= end) continue;
      const std::int64_t first = offset + begin * stride;
      TensorView at_x = by_depth.slice(1, first, first + 1);
      at_x.shape[1] = end - begin;
      at_x.strides[1] = by_depth.strides[1] * stride;
      visit(at_x, by_slice.select(3, i).slice(1, begin, end));
    }
  }
};

}  // namespace

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Conv1dOptions& options) {
  const bool fits = x.dims() == 3 && weight.defined() && weight.dims() == 3;
  CAIRN_CHECK(fits, kConv1d.name, "expected x [N, I, L] and weight [O, I / groups, k], got ",
              x.shape(), " and ", weight.defined() ? core::str(weight.shape()) : "none");
  return composed<kConv1d>(
      [&](const Tensor& image, const Tensor& kernel, const Tensor& shift) {
        const Tensor y = conv2d(with_height(image), with_height(kernel), shift,
                                {.stride = {1, options.stride},
                                 .padding = {0, options.padding},
                                 .dilation = {1, options.dilation},
                                 .groups = options.groups});
        return reshape(y, {y.size(0), y.size(1), y.size(3)});
      },
      x, weight, bias);
}

Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Conv3dOptions& options) {
  const bool fits = x.dims() == 5 && weight.defined() && weight.dims() == 5;
  CAIRN_CHECK(fits, kConv3d.name,
              "expected x [N, I, D, H, W] and weight [O, I / groups, kD, kH, kW], got ", x.shape(),
              " and ", weight.defined() ? core::str(weight.shape()) : "none");
  const auto [stride, padding, dilation, groups] = options;
  const UnfoldDepth unfold{weight.size(2), stride[0], padding[0], dilation[0]};
  const bool positive = stride[0] > 0 && dilation[0] > 0 && padding[0] >= 0;
  CAIRN_CHECK(positive && unfold.places(x.size(2)) > 0, kConv3d.name,
              "expected a depth of at least the kernel's, got ", x.shape(), " for ",
              weight.shape());
  const Conv2dOptions of_images{.stride = {stride[1], stride[2]},
                                .padding = {padding[1], padding[2]},
                                .dilation = {dilation[1], dilation[2]},
                                .groups = groups};
  return composed<kConv3d>(
      [&](const Tensor& volume, const Tensor& kernel, const Tensor& shift) {
        const Shape flat{kernel.size(0), kernel.size(1) * kernel.size(2), kernel.size(3),
                         kernel.size(4)};
        const Tensor y = conv2d(apply(unfold, volume), reshape(kernel, flat), shift, of_images);
        return transpose(reshape(y, {volume.size(0), -1, y.size(1), y.size(2), y.size(3)}), 1, 2);
      },
      x, weight, bias);
}

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Conv2dOptions& options) {
  return apply(Conv2d{options}, x, weight, bias);
}

Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Conv2dOptions& options, std::array<std::int64_t, 2> output_padding) {
  return apply(ConvTranspose2d{options, output_padding}, x, weight, bias);
}

}  // namespace cairn::autograd
