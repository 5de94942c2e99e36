#include "cairn/nn/pool.h"

#include "cairn/autograd/ops.h"

namespace cairn::nn {

namespace {

kernels::Pool2dOptions kernel_options(Size2 kernel, const Pool2dOptions& options) {
  return {.kernel = kernel.array(),
          .stride = options.stride.value_or(kernel).array(),
          .padding = options.padding.array()};
}

std::string describe(Size2 kernel) {
  return core::str(kernel.height, "x", kernel.width);
}

}  // namespace

MaxPool2d::MaxPool2d(Size2 kernel, const Pool2dOptions& options)
    : kernel_(kernel), options_(options) {
  extra_ = describe(kernel);
}
Tensor MaxPool2d::forward(const Tensor& x) {
  return autograd::max_pool2d(x, kernel_options(kernel_, options_));
}
std::shared_ptr<Module> MaxPool2d::make_like() const {
  return std::make_shared<MaxPool2d>(kernel_, options_);
}

AvgPool2d::AvgPool2d(Size2 kernel, const Pool2dOptions& options)
    : kernel_(kernel), options_(options) {
  extra_ = describe(kernel);
}
Tensor AvgPool2d::forward(const Tensor& x) {
  return autograd::avg_pool2d(x, kernel_options(kernel_, options_));
}
std::shared_ptr<Module> AvgPool2d::make_like() const {
  return std::make_shared<AvgPool2d>(kernel_, options_);
}

AdaptiveAvgPool2d::AdaptiveAvgPool2d(Size2 size) : Layer(size) {
  extra_ = "to " + describe(size);
}
Tensor AdaptiveAvgPool2d::forward(const Tensor& x) {
  return autograd::adaptive_avg_pool2d(x, argument<0>().array());
}

AdaptiveMaxPool2d::AdaptiveMaxPool2d(Size2 size) : Layer(size) {
  extra_ = "to " + describe(size);
}
Tensor AdaptiveMaxPool2d::forward(const Tensor& x) {
  return autograd::adaptive_max_pool2d(x, argument<0>().array());
}

Upsample::Upsample(double scale, const UpsampleOptions& options) : Layer(scale, options) {
  CAIRN_CHECK(scale > 0.0, "Upsample", "expected a positive scale, got ", scale);
  extra_ = core::str("times ", scale);
}
Tensor Upsample::forward(const Tensor& x) {
  CAIRN_CHECK(x.dims() == 4, "Upsample", "expected x [N, C, H, W], got ", x.shape());
  const auto scaled = [&](int dim) {
    return static_cast<std::int64_t>(static_cast<double>(x.size(dim)) * argument<0>());
  };
  const UpsampleOptions& options = argument<1>();
  return autograd::interpolate(x, {scaled(2), scaled(3)}, {options.mode, options.align_corners});
}

Tensor GlobalAvgPool2d::forward(const Tensor& x) {
  return autograd::global_avg_pool2d(x);
}
std::shared_ptr<Module> GlobalAvgPool2d::make_like() const {
  return std::make_shared<GlobalAvgPool2d>();
}

}  // namespace cairn::nn
