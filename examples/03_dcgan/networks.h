// Generator and discriminator of a DCGAN (Radford et al. 2016) for images [N, 1, 28, 28].
#pragma once

#include "cairn/nn/nn.h"

namespace dcgan {

using cairn::nn::Sequential;

/// z [N, nz, 1, 1] to images in (-1, 1).
inline Sequential generator(std::int64_t nz, std::int64_t width) {
  using namespace cairn::nn;
  return Sequential(
      ConvTranspose2d(nz, 4 * width, 7, {.bias = false}),  // [N, 4 width, 7, 7]
      BatchNorm2d(4 * width, {.relu = true}),
      ConvTranspose2d(4 * width, 2 * width, 4, {.stride = 2, .padding = 1, .bias = false}),
      BatchNorm2d(2 * width, {.relu = true}),  // [N, 2 width, 14, 14]
      ConvTranspose2d(2 * width, 1, 4, {.stride = 2, .padding = 1, .bias = false}), Tanh());
}

/// Images to logits [N, 1]: positive where they look real.
inline Sequential discriminator(std::int64_t width) {
  using namespace cairn::nn;
  return Sequential(Conv2d(1, width, 4, {.stride = 2, .padding = 1, .bias = false}),
                    LeakyReLU(0.2),  // [N, width, 14, 14]
                    Conv2d(width, 2 * width, 4, {.stride = 2, .padding = 1, .bias = false}),
                    BatchNorm2d(2 * width), LeakyReLU(0.2),  // [N, 2 width, 7, 7]
                    Conv2d(2 * width, 1, 7, {.bias = false}), Flatten());
}

/// The paper's: convolutions N(0, 0.02), batch norm's weights N(1, 0.02), biases 0.
inline void initialize_weights(cairn::nn::Module& model) {
  for (const auto& [name, tensor] : model.parameters()) {
    if (tensor.dims() == 4) cairn::nn::init::normal(tensor, 0.0, 0.02);
    if (tensor.dims() == 1 && name.ends_with("weight")) {
      cairn::nn::init::normal(tensor, 1.0, 0.02);
    }
  }
}

}  // namespace dcgan
