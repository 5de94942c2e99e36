#include "cairn/nn/conv.h"

#include "cairn/autograd/ops.h"
#include "parameters.h"

namespace cairn::nn {

namespace {

template <class Options>
kernels::Conv2dOptions kernel_options(const Options& options) {
  return {.stride = options.stride.array(),
          .padding = options.padding.array(),
          .dilation = options.dilation.array(),
          .groups = options.groups};
}

template <class Options>
void check(const char* kind, std::int64_t in, std::int64_t out, Size2 kernel,
           const Options& options) {
  CAIRN_CHECK(in > 0 && out > 0 && kernel.height > 0 && kernel.width > 0, kind,
              "expected positive channels and kernel, got ", in, " -> ", out, ", kernel ",
              kernel.height, " x ", kernel.width);
  CAIRN_CHECK(options.groups > 0 && in % options.groups == 0 && out % options.groups == 0, kind,
              "expected channels that are multiples of groups, got ", in, " -> ", out,
              " in groups of ", options.groups);
}

std::string describe(std::int64_t in, std::int64_t out, Size2 kernel, Size2 stride,
                     std::int64_t groups, bool bias) {
  std::string text = core::str(in, " -> ", out, ", ", kernel.height, "x", kernel.width);
  if (!(stride == Size2(1))) text += core::str(", stride ", stride.height, "x", stride.width);
  if (groups != 1) text += core::str(", ", groups, " groups");
  return bias ? text : text + ", no bias";
}

}  // namespace

Conv2d::Conv2d(std::int64_t in, std::int64_t out, Size2 kernel, const Conv2dOptions& options)
    : in_(in), kernel_(kernel), options_(options) {
  check("Conv2d", in, out, kernel, options);
  const Shape shape{out, in / options.groups, kernel.height, kernel.width};
  weight_ = add_parameter("weight", default_weight(shape));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, shape));
  extra_ = describe(in, out, kernel, options.stride, options.groups, options.bias);
}

Tensor Conv2d::forward(const Tensor& x) {
  return autograd::conv2d(x, weight_, bias_, kernel_options(options_));
}

std::shared_ptr<Module> Conv2d::make_like() const {
  return std::make_shared<Conv2d>(in_, weight_.size(0), kernel_, options_);
}

ConvTranspose2d::ConvTranspose2d(std::int64_t in, std::int64_t out, Size2 kernel,
                                 const ConvTranspose2dOptions& options)
    : out_(out), kernel_(kernel), options_(options) {
  check("ConvTranspose2d", in, out, kernel, options);
  const Shape shape{in, out / options.groups, kernel.height, kernel.width};
  weight_ = add_parameter("weight", default_weight(shape));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, shape));
  extra_ = describe(in, out, kernel, options.stride, options.groups, options.bias);
}

Tensor ConvTranspose2d::forward(const Tensor& x) {
  return autograd::conv_transpose2d(x, weight_, bias_, kernel_options(options_),
                                    options_.output_padding.array());
}

std::shared_ptr<Module> ConvTranspose2d::make_like() const {
  return std::make_shared<ConvTranspose2d>(weight_.size(0), out_, kernel_, options_);
}

}  // namespace cairn::nn
