// The bookkeeping of Accumulation. Gradients of models: tests/parallel/accumulation_test.cpp.
#include "cairn/optim/accumulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::optim {
namespace {

using testing::HasSubstr;

TEST(Accumulation, WeighsByTrueCounts) {
  Accumulation accumulation({.steps = 3});
  double gradient = 0.0;  // of the mean of x over samples of value 1, 2 and 4
  const std::vector<std::pair<std::int64_t, double>> batches = {{5, 1.0}, {3, 2.0}, {7, 4.0}};
  for (int window = 0; window < 3; ++window, gradient = 0.0) {
    for (std::size_t k = 0; k < batches.size(); ++k) {
      const MicroBatch micro = accumulation.begin(batches[k].first);
      EXPECT_EQ(micro.last(), k == 2);
      EXPECT_GT(micro.weight(), 0.4);
      EXPECT_LT(micro.weight(), 2.0);
      gradient += micro.weight() * batches[k].second;
    }
    EXPECT_DOUBLE_EQ(gradient * accumulation.finish(), (5 * 1.0 + 3 * 2.0 + 7 * 4.0) / 15);
  }
}

TEST(Accumulation, EqualMicroBatchesWeighOneAndAreAveraged) {
  Accumulation accumulation({.steps = 4});
  for (int k = 0; k < 4; ++k) EXPECT_EQ(accumulation.begin(8).weight(), 1.0);
  EXPECT_EQ(accumulation.finish(), 0.25);
  Accumulation single;
  EXPECT_TRUE(single.begin(3).last());
  EXPECT_EQ(single.finish(), 1.0);
}

TEST(Accumulation, CountsTokensOverAllRanks) {
  int collectives = 0;
  const auto two_ranks = [&](double x) { return ++collectives, 2 * x; };  // both alike
  for (const bool averaged : {false, true}) {
    Accumulation accumulation(
        {.tokens = 100, .all_reduce_sum = two_ranks, .gradients_are_averaged = averaged});
    EXPECT_FALSE(accumulation.begin(20).last());
    EXPECT_FALSE(accumulation.begin(25).last());
    EXPECT_EQ(accumulation.count(), 90.0);
    EXPECT_TRUE(accumulation.begin(5).last());
    // Summed: 20 / 100 of the whole for a count of 10 on each rank.
    EXPECT_DOUBLE_EQ(accumulation.finish(), 20.0 / 100 * (averaged ? 2 : 1));
  }
  EXPECT_EQ(collectives, 2 * 4);  // the world, three counts
}

TEST(Accumulation, FewCollectives) {
  int collectives = 0;
  Accumulation accumulation(
      {.steps = 5, .all_reduce_sum = [&](double x) { return ++collectives, 3 * x; }});
  for (int window = 0; window < 4; ++window) {
    for (int k = 0; k < 5; ++k) (void)accumulation.begin(10 + k);
    accumulation.finish();
  }
  EXPECT_EQ(collectives, 2 + 4);  // the world and the reference once, a total each window
}

TEST(Accumulation, SynchronizesInTheLastMicroBatchOnly) {
  std::vector<bool> calls;
  const auto note = [&](bool on) { calls.push_back(on); };
  Accumulation accumulation({.steps = 3, .set_synchronize = note});
  for (int k = 0; k < 3; ++k) (void)accumulation.begin(1);
  accumulation.finish();
  EXPECT_EQ(calls, (std::vector<bool>{false, false, true}));
}

TEST(Accumulation, AnEarlyEndOfTheEpoch) {
  Accumulation accumulation({.steps = 10});
  (void)accumulation.begin(4);
  EXPECT_TRUE(accumulation.begin(2, {.last = true}).last());
  EXPECT_DOUBLE_EQ(accumulation.finish(), 4.0 / 6);
  EXPECT_FALSE(accumulation.open());
}

TEST(Accumulation, ARankWithoutSamplesWeighsNothing) {
  Accumulation accumulation({.steps = 2, .all_reduce_sum = [](double x) { return x + 6; }});
  EXPECT_EQ(accumulation.begin(0).weight(), 0.0);
  EXPECT_EQ(accumulation.begin(0).weight(), 0.0);
  EXPECT_GT(accumulation.finish(), 0.0);
}

TEST(Accumulation, AnExceptionEndsTheWindowAndTurnsTheReductionOn) {
  std::vector<bool> calls;
  Accumulation accumulation({.steps = 2, .set_synchronize = [&](bool on) { calls.push_back(on); }});
  try {
    const MicroBatch micro = accumulation.begin(4);
    throw std::runtime_error("out of memory");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(calls, (std::vector<bool>{false, true}));
  try {
    (void)accumulation.begin(4);
    ADD_FAILURE() << "no error";
  } catch (const core::InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("an exception ended in micro-batch 1"));
    EXPECT_THAT(error.what(), HasSubstr("reset()"));
  }
  EXPECT_THROW(accumulation.finish(), core::InvalidArgument);
  accumulation.reset();
  (void)accumulation.begin(4);
  (void)accumulation.begin(4);
  EXPECT_EQ(accumulation.finish(), 0.5);
}

TEST(Accumulation, AMicroBatchInsideAHandlerIsNoFailure) {
  struct Trains {
    Accumulation& accumulation;
    ~Trains() { (void)accumulation.begin(1); }  // while another exception is in flight
  };
  Accumulation accumulation;
  try {
    const Trains trains{accumulation};
    throw std::runtime_error("elsewhere");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(accumulation.finish(), 1.0);
}

TEST(Accumulation, AnOpenWindowThatIsDroppedTurnsTheReductionOn) {
  std::vector<bool> calls;
  {
    Accumulation accumulation(
        {.steps = 2, .set_synchronize = [&](bool on) { calls.push_back(on); }});
    (void)accumulation.begin(1);
  }
  EXPECT_EQ(calls, (std::vector<bool>{false, true}));
}

TEST(Accumulation, RefusesWhatMakesNoSense) {
  EXPECT_THROW(Accumulation({.steps = 0}), core::InvalidArgument);
  EXPECT_THROW(Accumulation({.tokens = -1}), core::InvalidArgument);
  Accumulation accumulation({.steps = 2});
  EXPECT_THROW((void)accumulation.begin(-1), core::InvalidArgument);
  EXPECT_THROW((void)accumulation.begin(0), core::InvalidArgument);  // on all ranks
  EXPECT_THROW(accumulation.finish(), core::InvalidArgument);
  (void)accumulation.begin(2);
  EXPECT_THROW(accumulation.finish(), core::InvalidArgument);
  (void)accumulation.begin(2);
  EXPECT_THROW((void)accumulation.begin(2), core::InvalidArgument);
  accumulation.finish();
  (void)accumulation.begin(0);
  (void)accumulation.begin(0);
  EXPECT_THROW(accumulation.finish(), core::InvalidArgument);
  Accumulation by_tokens({.tokens = 10});
  EXPECT_THROW((void)by_tokens.begin(0), core::InvalidArgument);
}

TEST(Accumulation, StateHoldsTheReferenceAtBoundariesOnly) {
  const auto weights = [](Accumulation& accumulation) {
    std::vector<double> all;
    for (const int count : {3, 5}) all.push_back(accumulation.begin(count).weight());
    all.push_back(accumulation.finish());
    return all;
  };
  Accumulation unbroken({.steps = 2});
  weights(unbroken);
  const StateDict state = unbroken.state_dict();
  Accumulation resumed({.steps = 2});
  resumed.load_state_dict(state);
  EXPECT_EQ(weights(resumed), weights(unbroken));

  (void)unbroken.begin(1);
  EXPECT_THROW(unbroken.state_dict(), core::InvalidArgument);
  EXPECT_THROW(unbroken.load_state_dict(state), core::InvalidArgument);
  StateDict damaged;
  damaged.set("reference", -1.0);
  EXPECT_THROW(resumed.load_state_dict(damaged), core::DataError);
  EXPECT_THROW(resumed.load_state_dict({}), core::DataError);
}

}  // namespace
}  // namespace cairn::optim
