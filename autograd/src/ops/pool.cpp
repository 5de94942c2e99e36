// Pools. A result has its input's storage order.
#include "cairn/kernels/pool.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using kernels::Pool2dOptions;

namespace {

struct MaxPool2d {
  static constexpr OpInfo kInfo{"max_pool2d"};
  Pool2dOptions options;

  Tensor forward(Context& ctx, const Tensor& x) {
    Tensor y = empty_image(x, kernels::pool2d_shape(x.shape(), options));
    const Tensor index = Tensor::empty_strided(y.shape(), y.strides(), DType::i32, x.device());
    kernels::max_pool2d(x, y, index, options);
    ctx.save(index);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = ctx.new_gradient(0);
    kernels::max_pool2d_backward(dy, ctx.saved(0), dx, options);
    return {dx};
  }
};

struct AvgPool2d {
  static constexpr OpInfo kInfo{"avg_pool2d"};
  Pool2dOptions options;

  Tensor forward(Context&, const Tensor& x) {
    Tensor y = empty_image(x, kernels::pool2d_shape(x.shape(), options));
    kernels::avg_pool2d(x, y, options);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = ctx.new_gradient(0);
    kernels::avg_pool2d_backward(dy, dx, options);
    return {dx};
  }
};

}  // namespace

Tensor max_pool2d(const Tensor& x, const Pool2dOptions& options) {
  return apply(MaxPool2d{options}, x);
}
Tensor avg_pool2d(const Tensor& x, const Pool2dOptions& options) {
  return apply(AvgPool2d{options}, x);
}

Tensor global_avg_pool2d(const Tensor& x) {
  CAIRN_CHECK(x.dims() == 4, "global_avg_pool2d", "expected x [N, C, H, W], got ", x.shape());
  const std::array<std::int64_t, 2> image{x.size(2), x.size(3)};
  return flatten(avg_pool2d(x, {.kernel = image, .stride = image}), 1);
}

}  // namespace cairn::autograd
