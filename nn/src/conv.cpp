#include "cairn/nn/conv.h"

#include <algorithm>
#include <string>
#include <vector>

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

/// A size along each dimension of a convolution.
using Sizes = std::vector<std::int64_t>;
Sizes sizes(Size2 size) {
  return {size.height, size.width};
}

Sizes sizes(Size3 size) {
  return {size.depth, size.height, size.width};
}

std::string in_words(const Sizes& sizes) {  // "3x5"
  std::string text;
  for (const std::int64_t size : sizes) text += core::str(text.empty() ? "" : "x", size);
  return text;
}

void check(const char* kind, std::int64_t in, std::int64_t out, const Sizes& kernel,
           std::int64_t groups) {
  const bool positive = in > 0 && out > 0 && *std::min_element(kernel.begin(), kernel.end()) > 0;
  CAIRN_CHECK(positive, kind, "expected positive channels and kernel, got ", in, " -> ", out,
              ", kernel ", in_words(kernel));
  CAIRN_CHECK(groups > 0 && in % groups == 0 && out % groups == 0, kind,
              "expected channels that are multiples of groups, got ", in, " -> ", out,
              " in groups of ", groups);
}

std::string describe(std::int64_t in, std::int64_t out, const Sizes& kernel, const Sizes& stride,
                     std::int64_t groups, bool bias) {
  std::string text = core::str(in, " -> ", out, ", ", in_words(kernel));
  const bool strides = std::any_of(stride.begin(), stride.end(), [](auto s) { return s != 1; });
  if (strides) text += ", stride " + in_words(stride);
  if (groups != 1) text += core::str(", ", groups, " groups");
  return bias ? text : text + ", no bias";
}

}  // namespace

Conv1d::Conv1d(std::int64_t in, std::int64_t out, std::int64_t kernel, const Conv1dOptions& options)
    : in_(in), options_(options) {
  check("Conv1d", in, out, {kernel}, options.groups);
  const Shape shape{out, in / options.groups, kernel};
  weight_ = add_parameter("weight", default_weight(shape));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, shape));
  extra_ = describe(in, out, {kernel}, {options.stride}, options.groups, options.bias);
}

Tensor Conv1d::forward(const Tensor& x) {
  return autograd::conv1d(x, weight_, bias_,
                          {options_.stride, options_.padding, options_.dilation, options_.groups});
}

std::shared_ptr<Module> Conv1d::make_like() const {
  return std::make_shared<Conv1d>(in_, weight_.size(0), weight_.size(2), options_);
}

Conv2d::Conv2d(std::int64_t in, std::int64_t out, Size2 kernel, const Conv2dOptions& options)
    : in_(in), kernel_(kernel), options_(options) {
  check("Conv2d", in, out, sizes(kernel), options.groups);
  const Shape shape{out, in / options.groups, kernel.height, kernel.width};
  weight_ = add_parameter("weight", default_weight(shape));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, shape));
  extra_ = describe(in, out, sizes(kernel), sizes(options.stride), options.groups, options.bias);
}

Tensor Conv2d::forward(const Tensor& x) {
  return autograd::conv2d(x, weight_, bias_, kernel_options(options_));
}

std::shared_ptr<Module> Conv2d::make_like() const {
  return std::make_shared<Conv2d>(in_, weight_.size(0), kernel_, options_);
}

Conv3d::Conv3d(std::int64_t in, std::int64_t out, Size3 kernel, const Conv3dOptions& options)
    : in_(in), kernel_(kernel), options_(options) {
  check("Conv3d", in, out, sizes(kernel), options.groups);
  const Shape shape{out, in / options.groups, kernel.depth, kernel.height, kernel.width};
  weight_ = add_parameter("weight", default_weight(shape));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, shape));
  extra_ = describe(in, out, sizes(kernel), sizes(options.stride), options.groups, options.bias);
}

Tensor Conv3d::forward(const Tensor& x) {
  return autograd::conv3d(x, weight_, bias_,
                          {.stride = options_.stride.array(),
                           .padding = options_.padding.array(),
                           .dilation = options_.dilation.array(),
                           .groups = options_.groups});
}

std::shared_ptr<Module> Conv3d::make_like() const {
  return std::make_shared<Conv3d>(in_, weight_.size(0), kernel_, options_);
}

ConvTranspose2d::ConvTranspose2d(std::int64_t in, std::int64_t out, Size2 kernel,
                                 const ConvTranspose2dOptions& options)
    : out_(out), kernel_(kernel), options_(options) {
  check("ConvTranspose2d", in, out, sizes(kernel), options.groups);
  const Shape shape{in, out / options.groups, kernel.height, kernel.width};
  weight_ = add_parameter("weight", default_weight(shape));
  if (options.bias) bias_ = add_parameter("bias", default_bias(out, shape));
  extra_ = describe(in, out, sizes(kernel), sizes(options.stride), options.groups, options.bias);
}

Tensor ConvTranspose2d::forward(const Tensor& x) {
  return autograd::conv_transpose2d(x, weight_, bias_, kernel_options(options_),
                                    options_.output_padding.array());
}

std::shared_ptr<Module> ConvTranspose2d::make_like() const {
  return std::make_shared<ConvTranspose2d>(weight_.size(0), out_, kernel_, options_);
}

}  // namespace cairn::nn
