// Generator and discriminator of a DCGAN (Radford et al. 2016) in libtorch, for images [N, 1, 28,
// 28].
#pragma once

#include <torch/nn.h>

namespace dcgan {

inline torch::nn::Sequential generator(std::int64_t nz, std::int64_t width) {
  using Options = torch::nn::ConvTranspose2dOptions;
  return torch::nn::Sequential(
      torch::nn::ConvTranspose2d(Options(nz, 2 * width, 7).bias(false)),
      torch::nn::BatchNorm2d(2 * width), torch::nn::ReLU(),
      torch::nn::ConvTranspose2d(Options(2 * width, width, 4).stride(2).padding(1).bias(false)),
      torch::nn::BatchNorm2d(width), torch::nn::ReLU(),
      torch::nn::ConvTranspose2d(Options(width, 1, 4).stride(2).padding(1).bias(false)),
      torch::nn::Tanh());
}

/// Images to logits [N, 1]: positive where they look real.
inline torch::nn::Sequential discriminator(std::int64_t width) {
  using Options = torch::nn::Conv2dOptions;
  const auto leaky = torch::nn::LeakyReLUOptions().negative_slope(0.2);
  return torch::nn::Sequential(
      torch::nn::Conv2d(Options(1, width, 4).stride(2).padding(1).bias(false)),
      torch::nn::LeakyReLU(leaky),
      torch::nn::Conv2d(Options(width, 2 * width, 4).stride(2).padding(1).bias(false)),
      torch::nn::BatchNorm2d(2 * width), torch::nn::LeakyReLU(leaky),
      torch::nn::Conv2d(Options(2 * width, 1, 7).bias(false)), torch::nn::Flatten());
}

/// How far logits are from calling their images real, and fake.
inline torch::Tensor not_real(const torch::Tensor& logits) {
  return torch::softplus(-logits).mean();
}
inline torch::Tensor not_fake(const torch::Tensor& logits) {
  return torch::softplus(logits).mean();
}

}  // namespace dcgan
