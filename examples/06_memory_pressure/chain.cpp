#include "chain.h"

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/planner.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"

namespace memory_pressure {

using namespace cairn;

namespace {

/// x + tanh(conv(x)); keeps x and the tanh.
class Block : public nn::Module {
 public:
  explicit Block(std::int64_t channels)
      : conv_(add_module("conv", nn::Conv2d(channels, channels, 3, {.padding = 1}))) {}
  std::string kind() const override { return "Block"; }
  Tensor forward(const Tensor& x) override { return x + autograd::tanh((*conv_)(x)); }

 private:
  std::shared_ptr<nn::Conv2d> conv_;
};

Tensor image(const Job& job, std::uint64_t seed) {
  const Sizes& s = job.sizes;
  const Tensor x = Tensor::empty({1, s.channels, s.side, s.side}, DType::f32, Device{});
  Generator(seed).fill_normal(x, 0.0, 1.0);
  return autograd::channels_last(x);
}

using Forward = std::function<Tensor(nn::Sequential& chain, const Tensor& x)>;

/// Learns to turn one image into another. `prepare` sees the chain before the first step.
std::vector<double> train(const Job& job, const std::function<void()>& stepped,
                          const Forward& forward,
                          const std::function<void(nn::Sequential&, const Tensor&)>& prepare = {}) {
  manual_seed(job.seed);
  nn::Sequential chain;
  for (std::int64_t i = 0; i < job.sizes.blocks; ++i) chain.add(Block(job.sizes.channels));
  optim::FusedSGD optimizer(chain.parameters(), {.lr = 1e-2, .momentum = 0.9});
  const Tensor x = image(job, job.seed + 1), target = image(job, job.seed + 2);
  if (prepare) prepare(chain, x);
  std::vector<double> losses;
  for (int i = 0; i < job.steps; ++i) {
    const Tensor loss = nn::mse_loss(forward(chain, x), target);
    autograd::backward(loss);
    if (const auto r = optimizer.step(); !r.applied) log::warn("{}", r.reason);
    losses.push_back(loss.item());
    stepped();
  }
  return losses;
}

Way by_strategy(std::string name, std::string what, const checkpointing::Strategy& strategy) {
  return {std::move(name), std::move(what),
          [strategy](const Job& job, const std::function<void()>& stepped) {
            return train(job, stepped, [&](nn::Sequential& chain, const Tensor& x) {
              return checkpointing::checkpoint_sequential(chain, strategy, x);
            });
          }};
}

std::vector<double> plain(const Job& job, const std::function<void()>& stepped) {
  return train(job, stepped, [](nn::Sequential& chain, const Tensor& x) { return chain(x); });
}

/// The fastest schedule within the budget, room for the loss left.
std::vector<double> planned(const Job& job, const std::function<void()>& stepped) {
  const auto run = [](nn::Sequential& chain, const Tensor& x) { return chain(x); };
  return train(job, stepped, run, [&](nn::Sequential& chain, const Tensor& x) {
    const std::size_t room = 3 * x.nbytes();
    const std::size_t budget = job.budget > room ? job.budget - room : SIZE_MAX / 4;
    checkpointing::plan_recomputation(chain, x, budget, {.tensors_only = true}).apply(chain);
  });
}

}  // namespace

std::vector<Way> chain_ways() {
  return {
      {"plain", "every activation is kept", plain},
      by_strategy("sqrt-n", "as many segments as each has blocks", checkpointing::SqrtSegments{}),
      by_strategy("log-n", "halves within halves", checkpointing::Recursive{}),
      by_strategy("constant", "one block's activations, n / 2 times the forward",
                  checkpointing::ConstantMemory{}),
      {"planned", "the fastest schedule within the budget", planned},
  };
}

}  // namespace memory_pressure
