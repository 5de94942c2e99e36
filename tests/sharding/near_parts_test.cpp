// Weights that a smaller group of ranks keeps from a forward to its backward (reshard_within).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/ranks.h"
#include "sharding/side_by_side.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using test::expect_bits_of_plain;
using test::inputs;
using test::kAdam;
using test::kParameters;
using test::loss_of;
using test::Recipe;
using test::Recomputed;
using test::stage_3;
using test::Training;
using ::testing::HasSubstr;

/// On GPUs one rank's at a time, the others' are zero: NCCL adds up in an order of its own.
Tensor loss_in_turn(const parallel::ProcessGroup& group, std::uint64_t step, const Tensor& y) {
  const bool rests = core::default_device().is_cuda() && static_cast<int>(step % 4) != group.rank();
  return rests ? autograd::affine(loss_of(y), 0.0, 0.0) : loss_of(y);
}

Recipe adam_in_turn() {
  Recipe recipe = kAdam;
  recipe.in_turn = core::default_device().is_cuda();
  return recipe;
}

// Whoever gathers from whom: parts of a smaller group, between steps those of all.
TEST(WeightsInParts, MayStayInASmallerGroup) {
  std::vector<parallel::ShardedOptions> forms(5, stage_3());
  forms[1].shard_within = 4, forms[1].prefetch = 3;
  forms[2].units = {"tied"}, forms[2].keep_whole = test::kHidden;
  forms[3].distributed.find_unused_parameters = true;
  forms[4].reshard_within = 1;
  for (auto& options : forms) {
    if (options.reshard_within == 0) options.reshard_within = 2;
    test::run_threads(4, [&](parallel::ProcessGroup& group) {
      const auto run = [&](auto& /*net*/, auto& ddp, std::uint64_t step) {
        const Tensor first = loss_in_turn(group, step, ddp(inputs(group, 20 + step)));
        const Tensor second = loss_in_turn(group, step, ddp(inputs(group, 40 + step)));
        {
          const autograd::NoGradGuard no_grad;
          (void)ddp(inputs(group, 60 + step));
        }
        {
          const auto no_sync = ddp.no_sync();
          autograd::backward(first);
          autograd::backward(second);
        }
        autograd::backward(loss_in_turn(group, step, ddp(inputs(group, step))));
        (void)ddp(inputs(group, 80 + step));  // has no backward
      };
      expect_bits_of_plain<test::OddNet>(group, run, options);
    });
  }
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    parallel::ShardedOptions options = stage_3();
    options.reshard_within = 2;
    expect_bits_of_plain<Recomputed>(
        group,
        [&](auto&, auto& ddp, std::uint64_t step) {
          autograd::backward(loss_in_turn(group, step, ddp(inputs(group, step))));
        },
        options);
  });
}

// A rank that saves, or looks at what it has: the others gather without it.
TEST(WeightsInParts, OfASmallerGroupMayBeReadByOneRankAlone) {
  for (const auto masters : {optim::MasterStorage::f32, optim::MasterStorage::remainder}) {
    for (const auto level : {amp::OptLevel::O0, amp::OptLevel::O2}) {
      Recipe recipe = adam_in_turn();
      recipe.level = level;
      if (level == amp::OptLevel::O2) recipe.states.masters = masters;
      test::run_threads(4, [&](parallel::ProcessGroup& group) {
        Training training(recipe, group, kParameters, {.reshard_within = 2}),
            plain(recipe, group, test::kPlain);
        for (std::int64_t step = 1; step < 5; ++step) {
          const auto turn = static_cast<std::uint64_t>(step);
          const Tensor loss = loss_in_turn(group, turn, training.forward(step));
          const Tensor same = loss_in_turn(group, turn, plain.forward(step));
          if (group.rank() == step % 4) {
            (void)training.net.state_dict();
            (void)training.optimizer->state_dict();
          }
          training.precision->backward(loss);
          plain.precision->backward(same);
          test::expect_applied(training.precision->step());
          test::expect_applied(plain.precision->step());
        }
        EXPECT_EQ(test::difference_of_weights(training, plain), "");
      });
    }
  }
}

// What was kept from the forward is not what the weights are since.
TEST(WeightsInParts, OfASmallerGroupMayBeLoadedBeforeABackward) {
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    const Recipe recipe = adam_in_turn();
    Training training(recipe, group, kParameters, {.reshard_within = 2}),
        plain(recipe, group, test::kPlain), untrained(recipe, group, test::kPlain);
    test::expect_applied(training.step());
    test::expect_applied(plain.step());
    (void)training.forward(7);  // has no backward
    for (Training* one : {&training, &plain}) one->net.load_state_dict(untrained.net.state_dict());
    test::expect_applied(training.step());
    test::expect_applied(plain.step());
    EXPECT_EQ(test::difference_of_weights(training, plain), "");
  });
}

// All of them on one rank alone: the ranks hear of it, and nobody waits.
TEST(WeightsInParts, OfASmallerGroupThatOneRankGathersAreAnErrorOfAll) {
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    Training training(kAdam, group, kParameters, {.reshard_within = 2});
    test::expect_applied(training.step());
    const Tensor loss = loss_of(training.forward(1));
    const std::string said = test::message_of<core::CommunicationError>([&] {
      if (group.rank() == 1) const auto whole = training.gather();
      training.precision->backward(loss);
      (void)training.precision->step();
    });
    EXPECT_THAT(said, HasSubstr("weights"));
    EXPECT_THAT(said, ::testing::Not(HasSubstr("timeout")));
  });
}

}  // namespace
}  // namespace cairn
