// Pools and resampling. A result has its input's storage order.
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

constexpr OpInfo kInterpolate{"interpolate", CastPolicy::f32};
constexpr OpInfo kAdaptiveAvgPool2d{"adaptive_avg_pool2d"};

template <const OpInfo& info>
struct Resample {
  static constexpr OpInfo kInfo = info;
  std::array<std::int64_t, 2> size;
  ResampleOptions options;

  Tensor forward(Context&, const Tensor& x) {
    CAIRN_CHECK(x.dims() == 4 && size[0] > 0 && size[1] > 0, kInfo.name,
                "expected x [N, C, H, W] and a positive size, got ", x.shape(), " and ", size[0],
                " x ", size[1]);
    Tensor y = empty_image(x, {x.size(0), x.size(1), size[0], size[1]});
    kernels::resample2d(x, y, options);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = ctx.new_gradient(0);
    kernels::resample2d_backward(dy, dx, options);
    return {dx};
  }
};

}  // namespace

Tensor interpolate(const Tensor& x, std::array<std::int64_t, 2> size,
                   const ResampleOptions& options) {
  return apply(Resample<kInterpolate>{size, options}, x);
}
Tensor adaptive_avg_pool2d(const Tensor& x, std::array<std::int64_t, 2> size) {
  return apply(Resample<kAdaptiveAvgPool2d>{size, {ResampleMode::area}}, x);
}
Tensor adaptive_max_pool2d(const Tensor& x, std::array<std::int64_t, 2> size) {
  return max_pool2d(x, {.output = size});
}

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
