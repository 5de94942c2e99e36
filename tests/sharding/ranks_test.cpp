// Sharded trainings of real processes: what a rank keeps, and what the others hear where one cannot
// take its part in a step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "cairn/core/memory.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using test::make;
using test::Recipe;
using test::Training;
using ::testing::HasSubstr;

/// 1 MiB of weights, in tensors that no number of ranks divides.
nn::Sequential wide_net() {
  return nn::Sequential(nn::Linear(301, 407), nn::Linear(407, 299));
}

// 12 n / N bytes of masters and moments, and at most 1,024 elements of each tensor more.
TEST(ShardedMemory, IsWhatTheFormulaSays) {
  test::run_ranks(3, [](parallel::ProcessGroup& group) {
    nn::Sequential net = wide_net();
    parallel::ShardedDataParallel sharded(net, group);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
    for (int step = 0; step < 3; ++step) {
      precision.backward(
          autograd::mse_loss(sharded(Tensor::full({4, 301}, 0.1)), Tensor::full({4, 299}, 0.2)));
      ASSERT_TRUE(precision.step().applied);
    }
    std::size_t elements = 0, tensors = 0;
    for (const auto& [name, tensor] : net.parameters()) {
      elements += static_cast<std::size_t>(tensor.numel());
      ++tensors;
    }
    const core::MemoryStats stats = core::memory_stats(core::default_device());
    const std::size_t states = stats.of(core::MemoryCategory::optimizer_state);
    EXPECT_GE(states, 12 * elements / 3 - 12 * 1024 * tensors);
    EXPECT_LE(states, 12 * elements / 3 + 12 * 1024 * tensors + 64 * 3 * tensors);
    EXPECT_LE(stats.of(core::MemoryCategory::parameters), 2 * elements + 64 * tensors);
  });
}

// Weights, gradients, masters and moments of all ranks together, at O2 with Adam, before a step.
TEST(ShardedMemory, OfOneToEightRanks) {
  const auto bytes = [](core::MemoryCategory category) {
    return static_cast<double>(core::memory_stats(core::default_device()).of(category));
  };
  for (const auto stage : {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::gradients,
                           parallel::ZeroStage::parameters}) {
    const std::vector<std::pair<int, int>> forms{{1, 0}, {2, 0}, {3, 0}, {4, 0}, {6, 0},
                                                 {8, 0}, {4, 2}, {6, 3}, {6, 2}, {4, 1}};
    for (const auto& [ranks, within] : forms) {
      SCOPED_TRACE(core::str("stage ", static_cast<int>(stage), ", ", ranks, " ranks by ", within));
      const double copies = within == 0 ? 1 : ranks / within;
      test::run_threads(ranks, [&, within = within](parallel::ProcessGroup& group) {
        nn::Sequential net;
        for (int i = 0; i < 8; ++i) net.add(nn::Linear(256, 256));
        const double n = 8 * (256 * 256 + 256);
        parallel::ShardedDataParallel sharded(net, group, {.stage = stage, .shard_within = within});
        optim::FusedAdam optimizer(net.parameters());
        amp::Amp precision = amp::initialize(
            net, optimizer,
            {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
        for (int step = 0; step < 2; ++step) {
          precision.backward(test::loss_of(sharded(test::inputs(group, 1, 256))));
          group.barrier();
          const double divided_weights = stage == parallel::ZeroStage::parameters ? copies : ranks;
          const double divided_gradients = stage >= parallel::ZeroStage::gradients ? copies : ranks;
          if (step == 1 && group.rank() == 0) {
            using core::MemoryCategory;
            EXPECT_NEAR(bytes(MemoryCategory::parameters), 2 * n * divided_weights,
                        0.02 * 2 * n * divided_weights);
            EXPECT_NEAR(bytes(MemoryCategory::gradients), 2 * n * divided_gradients,
                        0.02 * 2 * n * divided_gradients);
            EXPECT_NEAR(bytes(MemoryCategory::optimizer_state), 12 * n * copies,
                        0.02 * 12 * n * copies);
          }
          group.barrier();
          ASSERT_TRUE(precision.step().applied);
        }
      });
    }
  }
}

/// One rank has no memory for its update, while the others wait for its part.
template <class Optimizer>
void expect_failed_update_reaches_all() {
  test::run_ranks(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net = wide_net();
    parallel::ShardedDataParallel sharded(net, group);
    Optimizer optimizer(net.parameters());
    autograd::backward(
        autograd::mse_loss(sharded(Tensor::full({4, 301}, 0.1)), Tensor::full({4, 299}, 0.2)));
    const auto held = core::memory_stats(core::default_device()).current_total;
    if (group.rank() == 1) core::set_memory_capacity(core::default_device(), held + (1 << 16));
    const std::string said = test::message_of<core::Error>([&] { (void)optimizer.step(); });
    core::set_memory_capacity(core::default_device(), SIZE_MAX);
    const char* expected = group.rank() == 1 ? "what the capacity leaves" : "its update failed";
    EXPECT_THAT(said, HasSubstr(expected));
  });
}

TEST(ShardedRanks, AFailedUpdateReachesTheOthers) {
  expect_failed_update_reaches_all<optim::FusedAdam>();
}

// The others wait for norms of its parts.
TEST(ShardedRanks, AFailedFirstPassReachesTheOthers) {
  expect_failed_update_reaches_all<optim::FusedLAMB>();
}

// Buckets of two losses never mix.
TEST(ShardedRanks, LossesInAnotherOrderAreAnErrorThatNamesBoth) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net = wide_net();
    parallel::ShardedDataParallel sharded(net, group);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(net, optimizer,
                                         {.opt_level = amp::OptLevel::O2,
                                          .half_dtype = DType::bf16,
                                          .num_losses = 2,
                                          .world = sharded.world()});
    const std::string said = test::message_of<core::CommunicationError>([&] {
      const Tensor y = sharded(Tensor::full({4, 301}, 0.1));
      precision.backward(autograd::mse_loss(y, Tensor::full({4, 299}, 0.2)),
                         {.loss_id = group.rank()});
    });
    EXPECT_THAT(said, HasSubstr("'loss 0 scaled by 1: "));
    EXPECT_THAT(said, HasSubstr("'loss 1 scaled by 1: "));
  });
}

// Where memory is not row-major there is no part that a state could name.
TEST(ShardedRanks, ParametersThatAreNotRowMajorAreUnsupported) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    class Strided : public nn::Module {
     public:
      Strided() : weight(add_parameter("weight", make_weight())) {}
      std::string kind() const override { return "Strided"; }
      Tensor forward(const Tensor& x) override { return autograd::mul(x, weight); }
      static Tensor make_weight() {
        Tensor w = Tensor::empty_strided({3, 4}, {1, 3}, DType::f32, core::default_device());
        kernels::fill(w, 0.5);
        return w;
      }
      Tensor weight;
    } net;
    parallel::ShardedDataParallel sharded(net, group);
    EXPECT_THAT(
        test::message_of<core::Unsupported>([&] { optim::FusedAdam optimizer(net.parameters()); }),
        HasSubstr("expected row-major parameters, got 'weight'"));
  });
}

// With one rank there is nothing to divide.
TEST(ShardedRanks, OneRankIsDistributedDataParallel) {
  auto group = parallel::ProcessGroup::single();
  const Recipe recipe{.name = "adam",
                      .optimizer = make<optim::FusedAdam>(optim::AdamOptions{.lr = 1e-2})};
  Training sharded(recipe, group, test::kStates), plain(recipe, group, test::kPlain);
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(sharded.step().applied);
    EXPECT_TRUE(plain.step().applied);
  }
  EXPECT_EQ(test::difference_of_weights(sharded.net, plain.net), "");
  std::int64_t elements = 0;
  EXPECT_EQ(test::difference_in_parts(sharded.optimizer->state_dict(),
                                      plain.optimizer->state_dict(), elements),
            "");
  EXPECT_EQ(elements, 0);
}

}  // namespace
}  // namespace cairn
