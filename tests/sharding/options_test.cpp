// Options of ShardedDataParallel: what they may not change, must agree on, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/ranks.h"
#include "sharding/side_by_side.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using test::expect_bits_of_plain;
using test::inputs;
using test::loss_of;
using test::stage_3;
using ::testing::HasSubstr;

// Whatever is gathered when, results are the same.
TEST(WeightsInParts, HaveTheSameBitsWhateverTheUnits) {
  std::vector<parallel::ShardedOptions> forms(8, stage_3());
  forms[0].prefetch = 0;
  forms[1].reshard_after_forward = false;
  forms[2].units = {"tied"};
  forms[3].units = {"first", "norm", "last"};
  forms[4].prefetch = 3;
  forms[5].prefetch = 3, forms[5].most_gathered = 20'000;
  forms[6].keep_whole = test::kHidden;  // biases and norms
  forms[7].keep_whole = 1'000'000, forms[7].reshard_after_forward = false;
  for (const auto& options : forms) {
    test::run_threads(2, [&](parallel::ProcessGroup& group) {
      expect_bits_of_plain<test::OddNet>(
          group,
          [&](auto&, auto& ddp, std::uint64_t step) {
            autograd::backward(loss_of(ddp(inputs(group, step))));
            (void)ddp(inputs(group, 50 + step));  // has no backward
          },
          options);
    });
  }
}

TEST(WeightsInParts, StayInGroupsThatDivideTheRanks) {
  const auto refused = [](parallel::ProcessGroup& group, parallel::ShardedOptions options) {
    test::OddNet net;
    options.stage = parallel::ZeroStage::parameters;
    return test::message_of<core::InvalidArgument>(
        [&] { parallel::ShardedDataParallel(net, group, options); });
  };
  test::run_threads(4, [&](parallel::ProcessGroup& group) {
    EXPECT_THAT(refused(group, {.reshard_within = 3}),
                HasSubstr("expected reshard_within to divide the number of ranks, 4, got 3"));
    EXPECT_THAT(refused(group, {.shard_within = 2, .reshard_within = 4}),
                HasSubstr("expected reshard_within to divide the number of ranks, 2, got 4"));
    EXPECT_THAT(refused(group, {.reshard_after_forward = false, .reshard_within = 2}),
                HasSubstr("expected no reshard_within with reshard_after_forward = false, got 2"));
  });
}

/// Ranks that gather in another order, or divide something else, would wait for each other.
TEST(ShardedOptions, MustBeTheSameOnAllRanks) {
  struct Pair {
    parallel::ShardedOptions others;
    const char *of_first, *of_others;
  };
  constexpr auto stage = parallel::ZeroStage::parameters;
  const Pair pairs[] = {
      {{.stage = parallel::ZeroStage::gradients}, "stage 3", "stage 2"},
      {{.stage = stage, .units = {"first"}}, "units on rank 0", "units 'first'"},
      {{.stage = stage, .reshard_after_forward = false},
       "reshard_after_forward true",
       "reshard_after_forward false"},
      {{.stage = stage, .reshard_within = 2}, "reshard_within 0", "reshard_within 2"},
      {{.stage = stage, .prefetch = 2}, "prefetch 1", "prefetch 2"},
      {{.stage = stage, .most_gathered = 7}, "most_gathered 0", "most_gathered 7"},
      {{.stage = stage, .keep_whole = 7}, "keep_whole 0", "keep_whole 7"}};
  test::run_threads(2, [&](parallel::ProcessGroup& group) {
    const bool first = group.rank() == 0;
    test::OddNet net;
    const auto refused = [&](const auto& make, const char* one, const char* other) {
      const std::string message = test::message_of<core::InvalidArgument>(make);
      EXPECT_THAT(message, HasSubstr(one));
      EXPECT_THAT(message, HasSubstr(other));
    };
    for (const Pair& pair : pairs) {
      refused([&] { parallel::ShardedDataParallel(net, group, first ? stage_3() : pair.others); },
              pair.of_first, pair.of_others);
    }
    const auto either = [&] {
      if (first) parallel::ShardedDataParallel(net, group);
      if (!first) parallel::DistributedDataParallel(net, group);
    };
    refused(either, "stage 1 on rank 0", "stage 0 on rank 1");
  });
}

TEST(WeightsInParts, AreGatheredByNumbersThatAreNotNegative) {
  test::OddNet net;
  EXPECT_THAT(test::message_of<core::InvalidArgument>([&] {
                parallel::ShardedDataParallel(
                    net, parallel::ProcessGroup::single(),
                    {.stage = parallel::ZeroStage::parameters, .prefetch = -1});
              }),
              HasSubstr("expected prefetch, most_gathered and keep_whole >= 0, got -1, 0 and 0"));
}

TEST(WeightsInParts, OfAllUnitsAtOnceAreNotFetchedAhead) {
  const auto expect_refused = [](parallel::ShardedOptions options, const char* got) {
    options.stage = parallel::ZeroStage::parameters;
    for (const bool is_static : {false, true}) {
      test::OddNet net;
      options.distributed.static_graph = is_static;
      options.distributed.find_unused_parameters = !is_static;
      EXPECT_THAT(test::message_of<core::InvalidArgument>([&] {
                    parallel::ShardedDataParallel(net, parallel::ProcessGroup::single(), options);
                  }),
                  HasSubstr(core::str("which gather all units at once, got ", got)));
    }
  };
  expect_refused({.prefetch = 2}, "2 and 0");
  expect_refused({.prefetch = 0}, "0 and 0");
  expect_refused({.most_gathered = 7}, "1 and 7");
}

// What would have no effect.
TEST(WeightsInParts, AloneHaveOptionsOfTheirs) {
  const auto single = parallel::ProcessGroup::single();
  for (const auto stage : {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::gradients}) {
    const auto expect_refused = [&](parallel::ShardedOptions options, const char* what) {
      test::OddNet net;
      options.stage = stage;
      EXPECT_THAT(test::message_of<core::InvalidArgument>(
                      [&] { parallel::ShardedDataParallel(net, single, options); }),
                  HasSubstr(core::str("expected ", what,
                                      " with ZeroStage::parameters only, got it with stage ",
                                      static_cast<int>(stage))));
    };
    expect_refused({.units = {"first"}}, "units");
    expect_refused({.reshard_after_forward = false}, "reshard_after_forward = false");
    expect_refused({.reshard_within = 2}, "reshard_within");
    expect_refused({.prefetch = 0}, "prefetch");
    expect_refused({.most_gathered = 1}, "most_gathered");
    expect_refused({.keep_whole = 1}, "keep_whole");
  }
}

TEST(WeightsInParts, RefuseWhatNeedsThemWhole) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    parallel::ShardedOptions options = stage_3();
    options.units = {"firt"};
    EXPECT_THAT(test::message_of([&] { parallel::ShardedDataParallel(net, group, options); }),
                HasSubstr("got 'firt'"));
    parallel::ShardedDataParallel sharded(net, group, stage_3());
    EXPECT_THAT(test::message_of<core::Unsupported>([&] { (void)sharded.join(); }),
                HasSubstr("got join()"));
  });
}

}  // namespace
}  // namespace cairn
