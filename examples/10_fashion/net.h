// A small residual net: images [N, 1, 28, 28] to logits [N, 10]; 26 million operations an image.
#pragma once

#include "cairn/autograd/ops.h"
#include "cairn/nn/nn.h"

namespace fashion {

using namespace cairn;

inline nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
  return nn::Conv2d(in, out, size, {.stride = stride, .padding = size / 2, .bias = false});
}

/// Two convolutions beside a shortcut, to half the size.
struct Residual : nn::Layer<Residual, std::int64_t, std::int64_t> {
  using Layer::Layer;  // Residual(in, out)
  std::int64_t in = argument<0>(), out = argument<1>();
  nn::Child<nn::Conv2d> conv1{*this, "conv1", conv(in, out, 3, 2)};
  nn::Child<nn::BatchNorm2d> norm1{*this, "norm1", nn::BatchNorm2d(out, {.relu = true})};
  nn::Child<nn::Conv2d> conv2{*this, "conv2", conv(out, out, 3, 1)};
  nn::Child<nn::BatchNorm2d> norm2{*this, "norm2", nn::BatchNorm2d(out)};
  nn::Child<nn::Conv2d> shortcut{*this, "shortcut", conv(in, out, 1, 2)};
  nn::Child<nn::BatchNorm2d> shortcut_norm{*this, "shortcut_norm", nn::BatchNorm2d(out)};
  Tensor forward(const Tensor& x) override {
    return autograd::add_relu(norm2(conv2(norm1(conv1(x)))), shortcut_norm(shortcut(x)));
  }
};

inline nn::Sequential net() {
  return nn::Sequential(conv(1, 16, 3, 1), nn::BatchNorm2d(16, {.relu = true}),  // [N, 16, 28, 28]
                        Residual(16, 32), Residual(32, 64),                      // [N, 64, 7, 7]
                        Residual(64, 128), Residual(128, 256),                   // [N, 256, 2, 2]
                        nn::GlobalAvgPool2d(), nn::Flatten(), nn::Linear(256, 10));
}

}  // namespace fashion
