// The tutorials' ConvNet in libtorch: images [N, 1, 28, 28] to log probabilities [N, 10].
#pragma once

#include <torch/nn.h>

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl()
      : features(register_module(
            "features", torch::nn::Sequential(
                            torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).padding(2)),
                            torch::nn::BatchNorm2d(16), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                            torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 5).padding(2)),
                            torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                            torch::nn::Flatten()))),
        fc(register_module("fc", torch::nn::Linear(32 * 7 * 7, 10))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::log_softmax(fc->forward(features->forward(x)), 1);
  }

  torch::nn::Sequential features;
  torch::nn::Linear fc;
};
TORCH_MODULE(ConvNet);
