// optim::Accumulation: uneven micro-batches on uneven ranks against one process on the whole batch.
#include "cairn/optim/accumulation.h"

#include <gtest/gtest.h>

#include <numeric>
#include <optional>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "ranks.h"
#include "support/near.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using SampleCounts = std::vector<std::vector<std::int64_t>>;  // samples by rank and micro-batch

constexpr int kInputs = 12, kClasses = 5, kWindows = 3;

nn::Sequential make_model() {
  manual_seed(11);
  return nn::Sequential(nn::Linear(kInputs, 24), nn::Tanh(), nn::Linear(24, kClasses));
}

struct Samples {
  Tensor x, labels;
};

Samples take(std::int64_t begin, std::int64_t count, std::uint64_t window) {
  const auto values = test::normal_tensor({256, kInputs}, 100 + window).to_vector<float>();
  std::vector<float> x(values.begin() + begin * kInputs,
                       values.begin() + (begin + count) * kInputs);
  std::vector<std::int64_t> labels;
  for (std::int64_t i = begin; i < begin + count; ++i) labels.push_back((i * 7 + 3) % kClasses);
  return {Tensor::from(x, {count, kInputs}), Tensor::from(labels, {count})};
}

template <class Model>
Tensor mean_loss(Model& model, const Samples& samples) {
  return autograd::cross_entropy(model(samples.x), samples.labels);
}

std::vector<std::vector<double>> accumulated_weights(const nn::Module& model) {
  std::vector<std::vector<double>> all;
  for (const auto& [name, tensor] : model.parameters()) all.push_back(tensor.to_vector<double>());
  return all;
}

std::vector<std::vector<double>> accumulated_gradients(const nn::Module& model,
                                                       double factor = 1.0) {
  std::vector<std::vector<double>> all;
  for (const auto& [name, tensor] : model.parameters()) {
    all.push_back(tensor.grad().to_vector<double>());
    for (double& element : all.back()) element *= factor;
  }
  return all;
}

std::int64_t total(const SampleCounts& counts) {
  std::int64_t sum = 0;
  for (const auto& rank : counts) sum = std::accumulate(rank.begin(), rank.end(), sum);
  return sum;
}

/// Trains kWindows steps with the micro-batches of `counts` and with one batch of all their
/// samples; gradients and weights agree within f32 rounding.
void compare(ProcessGroup& group, const SampleCounts& counts, std::int64_t tokens) {
  const auto& own = counts[static_cast<std::size_t>(group.rank())];
  std::int64_t first = 0;
  for (int rank = 0; rank < group.rank(); ++rank) {
    const auto& others = counts[static_cast<std::size_t>(rank)];
    first = std::accumulate(others.begin(), others.end(), first);
  }

  nn::Sequential model = make_model(), whole = make_model();
  DistributedDataParallel ddp(model, group);
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.5, .momentum = 0.9});
  optim::FusedSGD reference(whole.parameters(), {.lr = 0.5, .momentum = 0.9});
  optim::Accumulation accumulation(
      {.steps = static_cast<std::int64_t>(own.size()), .tokens = tokens, .world = ddp.world()});

  for (std::uint64_t window = 0; window < kWindows; ++window) {
    autograd::backward(mean_loss(whole, take(0, total(counts), window)));
    std::int64_t begin = first;
    for (const std::int64_t& count : own) {
      const auto micro = accumulation.begin(count);
      EXPECT_EQ(micro.last(), &count == &own.back());
      const Tensor loss = mean_loss(ddp, take(begin, std::max<std::int64_t>(count, 1), window));
      autograd::backward(autograd::affine(loss, micro.weight(), 0.0));
      begin += count;
    }
    const double factor = accumulation.finish();
    test::expect_near(accumulated_gradients(model, factor), accumulated_gradients(whole), 3e-7,
                      "gradient");
    test::expect_applied(optimizer.step({.gradient_scale = factor}));
    test::expect_applied(reference.step());
    test::expect_near(accumulated_weights(model), accumulated_weights(whole), 2e-6, "weight");
  }
}

const SampleCounts kUneven = {{5, 3, 7, 1}, {2, 6, 1, 9}, {4, 4, 0, 1}};

TEST(Accumulation, UnevenMicroBatchesOfThreeThreads) {
  test::run_threads(3, [](ProcessGroup& group) { compare(group, kUneven, 0); });
}
TEST(Accumulation, UnevenMicroBatchesOfTwoProcesses) {
  test::run_ranks(2, [](ProcessGroup& group) { compare(group, {kUneven[0], kUneven[1]}, 0); });
}
TEST(Accumulation, UnevenMicroBatchesOfOneRank) {
  test::run_threads(1, [](ProcessGroup& group) { compare(group, {kUneven[1]}, 0); });
}
TEST(Accumulation, ByTokensOverThreeThreads) {
  test::run_threads(3, [](ProcessGroup& group) { compare(group, kUneven, total(kUneven)); });
}
TEST(Accumulation, ARankWithoutAnySamples) {
  test::run_threads(2, [](ProcessGroup& group) { compare(group, {{3, 8}, {0, 0}}, 0); });
}

}  // namespace
}  // namespace cairn::parallel
