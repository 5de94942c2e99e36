// The ConvNet of the tutorials: images [N, 1, 28, 28] to logits [N, 10].
#pragma once

#include "cairn/nn/nn.h"

namespace support {

inline cairn::nn::Sequential conv_net() {
  using namespace cairn;
  return nn::Sequential(nn::Conv2d(1, 16, 5, {.padding = 2}), nn::BatchNorm2d(16, {.relu = true}),
                        nn::MaxPool2d(2),  // [N, 16, 14, 14]
                        nn::Conv2d(16, 32, 5, {.padding = 2}), nn::BatchNorm2d(32, {.relu = true}),
                        nn::MaxPool2d(2),  // [N, 32, 7, 7]
                        nn::Flatten(), nn::Linear(32 * 7 * 7, 10));
}

}  // namespace support
