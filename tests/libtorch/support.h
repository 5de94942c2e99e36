// A small convolutional network of libtorch's, batches for it, and a plain f32 loop to compare
// with.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "cairn/libtorch/amp.h"
#include "cairn/libtorch/model.h"
#include "cairn/libtorch/tensors.h"
#include "cairn/optim/adam.h"

namespace cairn::test {

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl()
      : conv(register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        fc(register_module("fc", torch::nn::Linear(4 * 3 * 3, 5))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(norm->forward(conv->forward(x))), 2);
    return torch::log_softmax(fc->forward(x.flatten(1)), 1);
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear fc;
};
TORCH_MODULE(ConvNet);

inline ConvNet conv_net(std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return {};
}

struct Batch {
  torch::Tensor data, target;
};
inline Batch batch_of(std::int64_t samples, std::uint64_t seed) {
  torch::manual_seed(100 + seed);
  return {torch::randn({samples, 1, 8, 8}), torch::randint(0, 5, {samples}, torch::kLong)};
}

/// The largest difference of two tensors, over the largest magnitude of `expected`.
inline double difference(const torch::Tensor& got, const torch::Tensor& expected) {
  const auto a = got.detach().to(torch::kDouble), b = expected.detach().to(torch::kDouble);
  return (a - b).abs().max().item<double>() / std::max(b.abs().max().item<double>(), 1e-12);
}

/// Runs f in a plain libtorch loop with AdamW.
class PlainLoop {
 public:
  explicit PlainLoop(double lr = 1e-2)
      : optimizer_(net->parameters(), torch::optim::AdamWOptions(lr).weight_decay(0.01)) {}
  torch::Tensor loss(const Batch& batch) {
    return torch::nll_loss(net->forward(batch.data), batch.target);
  }
  double step(const Batch& batch) {
    optimizer_.zero_grad();
    const auto value = loss(batch);
    value.backward();
    optimizer_.step();
    return value.item<double>();
  }
  ConvNet net = conv_net();

 private:
  torch::optim::AdamW optimizer_;
};

/// The same with Cairn.
class CairnLoop {
 public:
  explicit CairnLoop(const amp::Options& options, double lr = 1e-2)
      : optimizer(model.parameters(), {.lr = lr, .weight_decay = 0.01}),
        precision(libtorch::initialize(model, optimizer, options)) {}
  torch::Tensor loss(const Batch& batch) {
    const auto y = model.run([&](const torch::Tensor& x) { return net->forward(x); }, batch.data);
    return torch::nll_loss(y, batch.target);
  }
  double step(const Batch& batch, const optim::StepOptions& options = {}) {
    const auto value = loss(batch);
    precision.backward(value);
    result = precision.step(options);
    return value.item<double>();
  }
  /// A parameter's exact value.
  torch::Tensor exact(const std::string& name) {
    for (const auto& parameter : model.parameters()) {
      if (parameter.name == name)
        return libtorch::to_torch(kernels::master_value(parameter.tensor));
    }
    throw std::runtime_error("no parameter " + name);
  }
  ConvNet net = conv_net();
  libtorch::Model model{*net};
  optim::FusedAdam optimizer;
  libtorch::Amp precision;
  optim::StepResult result;
};

}  // namespace cairn::test
