// The largest batch for a budget: of steps whose memory is known, and of a model's.
#include "cairn/checkpointing/batch_size.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <vector>

#include "cairn/autograd/engine.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "support/expect_error.h"

namespace cairn::checkpointing {
namespace {

constexpr std::size_t kSample = 4096;

std::size_t live() {
  return core::memory_stats(core::default_device()).current_total;
}

/// Each sample takes so many bytes, and something stays after the first step.
struct KnownStep {
  std::vector<std::int64_t> batches;
  Tensor stays;
  void operator()(std::int64_t batch) {
    batches.push_back(batch);
    const Tensor samples = Tensor::empty({batch, std::int64_t{kSample}}, DType::u8);
    if (!stays.defined()) stays = Tensor::empty({std::int64_t{10 * kSample}}, DType::u8);
  }
};

TEST(LargestBatch, IsTheOneThatFillsTheBudget) {
  for (const std::int64_t batch : {1, 2, 3, 7, 8, 9, 100}) {
    KnownStep step;
    const std::size_t budget = live() + kSample * (10 + static_cast<std::size_t>(batch)) + 100;
    const BatchSize found = largest_batch(std::ref(step), {.budget = budget});
    EXPECT_EQ(found.batch, batch);
    EXPECT_EQ(found.peak_bytes, budget - 100);
    EXPECT_LE(step.batches.size(), 18u);
  }
}

TEST(LargestBatch, IsAtMostWhatIsAsked) {
  for (const std::int64_t most : {1, 5, 8}) {
    KnownStep step;
    const std::size_t budget = live() + 1000 * kSample;
    EXPECT_EQ(largest_batch(std::ref(step), {.budget = budget, .most = most}).batch, most);
    EXPECT_EQ(*std::max_element(step.batches.begin(), step.batches.end()), most);
  }
}

/// From the second step on there are gradients and moments.
TEST(LargestBatch, OfATrainingHasRunAfterAStep) {
  manual_seed(1);
  nn::Sequential model{nn::Linear(256, 256), nn::ReLU(), nn::Linear(256, 10)};
  optim::FusedAdam optimizer(model.parameters());
  const auto step = [&](std::int64_t batch) {
    const Tensor x = Tensor::zeros({batch, 256}, DType::f32);
    const Tensor labels = Tensor::zeros({batch}, DType::i64);
    autograd::backward(nn::cross_entropy(model(x), labels));
    (void)optimizer.step();
  };
  const std::size_t before = core::memory_capacity(core::default_device());
  const std::size_t budget = live() + (std::size_t{2} << 20);
  const BatchSize found = largest_batch(step, {.budget = budget});
  EXPECT_EQ(core::memory_capacity(core::default_device()), before);
  EXPECT_GT(found.batch, 1);
  EXPECT_LE(found.peak_bytes, budget);
  core::set_memory_capacity(core::default_device(), budget);
  EXPECT_NO_THROW(step(found.batch));
  EXPECT_THROW(step(found.batch + 1), core::OutOfMemory);
  core::set_memory_capacity(core::default_device(), before);
}

TEST(LargestBatch, SaysWhatIsMissing) {
  KnownStep step;
  if (core::default_device().is_cpu()) {
    test::expect_error<core::InvalidArgument>([&] { (void)largest_batch(std::ref(step)); },
                                              {"expected a budget in bytes"});
  }
  EXPECT_THROW((void)largest_batch(std::ref(step), {.budget = live() + 100}), core::OutOfMemory);
  EXPECT_THROW((void)largest_batch(std::ref(step), {.budget = live() + 100, .most = 0}),
               core::InvalidArgument);
  const auto broken = [](std::int64_t) { throw std::runtime_error("no data"); };
  EXPECT_THROW((void)largest_batch(broken, {.budget = live() + 100}), std::runtime_error);
}

}  // namespace
}  // namespace cairn::checkpointing
