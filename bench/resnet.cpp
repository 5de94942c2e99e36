#include "resnet.h"

#include "cairn/autograd/ops.h"

namespace bench {

using namespace cairn;

namespace {

nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t size, int stride) {
  return nn::Conv2d(in, out, size, {.stride = stride, .padding = size / 2, .bias = false});
}

}  // namespace

ResidualBlock::ResidualBlock(std::int64_t in, std::int64_t out, int stride)
    : conv1_(add_module("conv1", conv(in, out, 3, stride))),
      conv2_(add_module("conv2", conv(out, out, 3, 1))),
      norm1_(add_module("norm1", nn::BatchNorm2d(out, {.relu = true}))),
      norm2_(add_module("norm2", nn::BatchNorm2d(out))) {
  if (stride == 1 && in == out) return;
  shortcut_ = add_module("shortcut", conv(in, out, 1, stride));
  shortcut_norm_ = add_module("shortcut_norm", nn::BatchNorm2d(out));
}

Tensor ResidualBlock::forward(const Tensor& x) {
  const Tensor y = (*norm2_)((*conv2_)((*norm1_)((*conv1_)(x))));
  return autograd::add_relu(y, shortcut_ ? (*shortcut_norm_)((*shortcut_)(x)) : x);
}

ResNet18::ResNet18()
    : stem_(add_module("stem", conv(3, 64, 3, 1))),
      norm_(add_module("norm", nn::BatchNorm2d(64, {.relu = true}))) {
  std::int64_t width = 64;
  for (int i = 0; i < 8; ++i) {
    const bool next = i > 0 && i % 2 == 0;
    const std::int64_t out = next ? 2 * width : width;
    blocks_.push_back(
        add_module("block" + std::to_string(i), ResidualBlock(width, out, next ? 2 : 1)));
    width = out;
  }
  head_ = add_module("head", nn::Linear(width, 10));
}

Tensor ResNet18::forward(const Tensor& x) {
  Tensor y = (*norm_)((*stem_)(x));
  for (const auto& block : blocks_) y = (*block)(y);
  return (*head_)(autograd::mean(y, {2, 3}));
}

}  // namespace bench
