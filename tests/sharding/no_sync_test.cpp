// Whole gradients under no_sync() where ranks divide them (ZeRO, stages 2 and 3): what they take,
// and what becomes of them in the backward or the step that reduces. Their bits: bits_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/core/memory.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"
#include "support/step.h"

namespace cairn {
namespace {

using parallel::ZeroStage;
using test::kAdam;
using test::Training;
using ::testing::HasSubstr;

// 2 n bytes; 4 n once a second one is added to it; the part of that once they are reduced.
TEST(NoSyncMemory, IsThatOfWholeGradients) {
  for (const auto stage : {ZeroStage::gradients, ZeroStage::parameters}) {
    test::run_threads(2, [&](parallel::ProcessGroup& group) {
      nn::Sequential net;
      for (int i = 0; i < 4; ++i) net.add(nn::Linear(256, 256));
      const double n = 4 * (256 * 256 + 256);
      parallel::ShardedDataParallel sharded(net, group, {.stage = stage});
      optim::FusedAdam optimizer(net.parameters());
      amp::Amp precision = amp::initialize(
          net, optimizer,
          {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
      const auto backward = [&](bool reduces) {
        const auto no_sync = sharded.no_sync(!reduces);
        precision.backward(test::loss_of(sharded(test::inputs(group, 1, 256))));
      };
      const auto expect_held = [&](double bytes) {
        group.barrier();
        const auto held = core::memory_stats(core::default_device());
        if (group.rank() == 0) {
          EXPECT_NEAR(static_cast<double>(held.of(core::MemoryCategory::gradients)), bytes,
                      0.02 * bytes);
        }
        group.barrier();
      };
      backward(true);
      expect_held(2 * n);  // of both ranks
      test::expect_applied(precision.step());
      expect_held(0);
      for (const double bytes : {2, 4}) {
        backward(false);
        expect_held(2 * bytes * n);
      }
      backward(true);
      expect_held(4 * n);
      test::expect_applied(precision.step());
      expect_held(0);
    });
  }
}

/// The same window of a training under DistributedDataParallel and of one that is divided.
template <class Window>
void expect_bits_of_plain(int ranks, int within, const Window& window) {
  for (const auto stage : {ZeroStage::gradients, ZeroStage::parameters}) {
    test::run_threads(ranks, [&](parallel::ProcessGroup& group) {
      Training plain(kAdam, group, test::kPlain);
      Training divided(kAdam, group, stage, {.shard_within = within});
      for (std::int64_t step = 0; step < 4; ++step) {
        for (Training* one : {&plain, &divided}) window(*one, 4 * step);
        const optim::StepResult expected = plain.precision->step(), got = divided.precision->step();
        test::expect_applied(expected);
        ASSERT_EQ(got.gradient_norm, expected.gradient_norm) << step;
        ASSERT_EQ(test::difference_of_weights(divided, plain), "") << step;
      }
    });
  }
}

TEST(NoSync, AloneIsReducedByTheStep) {
  for (const auto& [ranks, within] : {std::pair{2, 0}, std::pair{4, 2}}) {
    if (ranks > test::ranks_in_order() && core::default_device().is_cuda()) continue;
    expect_bits_of_plain(ranks, within, [](Training& one, std::int64_t batch) {
      const auto no_sync = one.ddp().no_sync();
      one.backward(batch, -1);
      if (batch > 0) one.backward(batch + 1, -1);
    });
  }
}

TEST(NoSync, ReadsWholeGradientsUntilTheyAreReduced) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Training plain(kAdam, group, test::kPlain), divided(kAdam, group, test::kGradients);
    for (Training* one : {&plain, &divided}) {
      const auto no_sync = one->ddp().no_sync();
      one->backward(1, -1);
    }
    const NamedTensors own = divided.net.parameters(), expected = plain.net.parameters();
    for (std::size_t i = 0; i < own.size(); ++i)
      EXPECT_EQ(own[i].tensor.grad().to_vector(), expected[i].tensor.grad().to_vector()) << i;
    divided.backward(2, -1);
    EXPECT_THAT(test::message_of([&] { (void)own[0].tensor.grad(); }),
                HasSubstr("got this rank's part of it"));
  });
}

// What was stashed of whole gradients is reduced with the others, not taken for a part.
TEST(NoSync, OfWhatIsMovedToASumIsReducedWithTheOthers) {
  expect_bits_of_plain(2, 0, [](Training& one, std::int64_t batch) {
    {
      const auto no_sync = one.ddp().no_sync();
      one.backward(batch, -1);
      (void)one.optimizer->stash();
    }
    one.backward(batch + 1, -1);
  });
}

TEST(NoSync, OfTwoLossesAddsUpBoth) {
  for (const auto stage : {ZeroStage::gradients, ZeroStage::parameters}) {
    test::run_threads(2, [&](parallel::ProcessGroup& group) {
      manual_seed(5);
      nn::Linear net(test::kInputs, 300);
      parallel::ShardedDataParallel sharded(net, group, {.stage = stage});
      optim::FusedSGD optimizer(net.parameters(), {.lr = 0.5});
      amp::Amp precision = amp::initialize(
          net, optimizer,
          {.opt_level = amp::OptLevel::O0, .num_losses = 2, .world = sharded.world()});
      const auto weights = [&] {
        const auto whole = sharded.gather_parameters();
        return net.parameters()[0].tensor.to_vector();
      };
      const auto before = weights();
      for (const bool last : {false, true}) {
        const auto no_sync = sharded.no_sync(!last);
        for (int loss = 0; loss < 2; ++loss)
          precision.backward(
              autograd::sum(sharded(Tensor::full({1, test::kInputs}, 1.0 + group.rank()))),
              {.loss_id = loss});
      }
      test::expect_applied(precision.step());
      const auto after = weights();
      for (std::size_t i = 0; i < after.size(); ++i)
        ASSERT_NEAR(after[i], before[i] - 0.5 * 4 * 1.5, 1e-5) << i;
    });
  }
}

TEST(NoSync, AfterABackwardThatReducedIsAnErrorOfTheNext) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Training one(kAdam, group, test::kGradients);
    one.backward(1, -1);
    {
      const auto no_sync = one.ddp().no_sync();
      one.backward(2, -1);
    }
    EXPECT_THAT(test::message_of<core::InvalidArgument>([&] { (void)one.optimizer->stash(); }),
                HasSubstr("expected no_sync ahead of the first backward that reduces"));
    test::expect_applied(one.precision->step());  // the sum, and what is local
  });
}

// Ranks whose losses reach different parameters under no_sync.
TEST(NoSync, OfParametersThatLossesDoNotReach) {
  class Heads : public nn::Module {
   public:
    Heads() {
      manual_seed(5);
      for (const char* name : {"a", "b", "c"})
        heads_.push_back(add_module(name, nn::Linear(test::kInputs, 300)));
    }
    std::string kind() const override { return "Heads"; }
    Tensor forward(const Tensor& x) override { return (*heads_[head])(x); }
    std::size_t head = 0;

   private:
    std::vector<std::shared_ptr<nn::Linear>> heads_;
  };
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Heads net, same;
    const parallel::DistributedOptions options{.find_unused_parameters = true};
    parallel::ShardedDataParallel sharded(net, group,
                                          {.stage = ZeroStage::gradients, .distributed = options});
    parallel::DistributedDataParallel plain(same, group, options);
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    const auto own = static_cast<std::size_t>(group.rank());
    for (std::uint64_t step = 0; step < 4; ++step) {
      const bool ends_in_a_step = step % 2 == 1;
      for (Heads* one : {&net, &same}) {
        parallel::DistributedDataParallel& ddp = one == &net ? sharded : plain;
        for (const bool last : {false, true}) {
          const auto no_sync = ddp.no_sync(!last || ends_in_a_step);
          one->head = last ? 2 : own;
          autograd::backward(test::loss_of(ddp(test::inputs(group, 2 * step + (last ? 1 : 0)))));
        }
      }
      test::expect_applied(optimizer.step());
      test::expect_applied(expected.step());
      ASSERT_EQ(test::difference_of_weights(net, same), "") << step;
    }
  });
}

}  // namespace
}  // namespace cairn
