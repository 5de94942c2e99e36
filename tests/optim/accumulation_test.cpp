// The bookkeeping of Accumulation. Gradients of models: tests/parallel/accumulation_test.cpp.
#include "cairn/optim/accumulation.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "cairn/core/error.h"
#include "support/expect_error.h"
#include "support/fake_world.h"

namespace cairn::optim {
namespace {

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

TEST(Accumulation, AWindowWeighsByTheMeanOfTheOneBefore) {
  Accumulation accumulation({.steps = 2});
  for (const std::int64_t count : {2, 6}) (void)accumulation.begin(count);
  EXPECT_EQ(accumulation.finish(), 0.25);              // 2 / 8
  EXPECT_EQ(accumulation.begin(8).weight(), 8.0 / 4);  // 4 samples a micro-batch so far
}

TEST(Accumulation, CountsTokensOverAllRanks) {
  for (const bool averaged : {false, true}) {
    const auto two_ranks = test::alike(2);
    two_ranks->reduces = averaged;
    Accumulation accumulation({.tokens = 100, .world = {0, 2, two_ranks}});
    EXPECT_FALSE(accumulation.begin(20).last());
    EXPECT_FALSE(accumulation.begin(25).last());
    EXPECT_EQ(accumulation.count(), 90.0);
    EXPECT_TRUE(accumulation.begin(5).last());
    // Summed: 20 / 100 of the whole for a count of 10 on each rank.
    EXPECT_DOUBLE_EQ(accumulation.finish(), 20.0 / 100 * (averaged ? 2 : 1));
    EXPECT_EQ(two_ranks->exchanges, 3);  // the counts
  }
}

TEST(Accumulation, FewCollectivesAndReductionInTheLastMicroBatchOnly) {
  const auto three_ranks = test::alike(3);
  Accumulation accumulation({.steps = 3, .world = {0, 3, three_ranks}});
  for (int window = 0; window < 4; ++window) {
    three_ranks->synchronized.clear();
    for (int k = 0; k < 3; ++k) (void)accumulation.begin(10 + k);
    accumulation.finish();
    EXPECT_EQ(three_ranks->synchronized, (std::vector<bool>{false, false, true}));
  }
  EXPECT_EQ(three_ranks->exchanges, 1 + 4);  // the reference once, a total each window
}

TEST(Accumulation, AnEarlyEndOfTheEpoch) {
  Accumulation accumulation({.steps = 10});
  (void)accumulation.begin(4);
  EXPECT_TRUE(accumulation.begin(2, {.last = true}).last());
  EXPECT_DOUBLE_EQ(accumulation.finish(), 4.0 / 6);
  EXPECT_FALSE(accumulation.open());
}

TEST(Accumulation, ARankWithoutSamplesWeighsNothing) {
  const auto link = std::make_shared<test::FakeLink>();
  link->all = [](const std::string& value) {
    const double six = 6.0;
    return std::vector<std::string>{value, {reinterpret_cast<const char*>(&six), sizeof six}};
  };
  Accumulation accumulation({.steps = 2, .world = {0, 2, link}});
  EXPECT_EQ(accumulation.begin(0).weight(), 0.0);
  EXPECT_EQ(accumulation.begin(0).weight(), 0.0);
  EXPECT_GT(accumulation.finish(), 0.0);
}

TEST(Accumulation, AnOpenWindowThatIsDroppedTurnsTheReductionOn) {
  const auto link = test::alike(1);
  (void)Accumulation({.steps = 2, .world = {0, 1, link}}).begin(1);
  EXPECT_EQ(link->synchronized, (std::vector<bool>{false, true}));
}

TEST(Accumulation, AnExceptionEndsTheWindowAndTurnsTheReductionOn) {
  const auto link = test::alike(1);
  Accumulation accumulation({.steps = 2, .world = {0, 1, link}});
  try {
    const MicroBatch micro = accumulation.begin(4);
    throw std::runtime_error("out of memory");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(link->synchronized, (std::vector<bool>{false, true}));
  test::expect_error<core::InvalidArgument>([&] { (void)accumulation.begin(4); },
                                            {"an exception ended in micro-batch 1", "reset()"});
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
  unbroken.load_state_dict(state);  // the open window belongs to the run before
  EXPECT_FALSE(unbroken.open());
  StateDict damaged;
  damaged.set("reference", -1.0);
  EXPECT_THROW(resumed.load_state_dict(damaged), core::DataError);
  EXPECT_THROW(resumed.load_state_dict({}), core::DataError);
}

}  // namespace
}  // namespace cairn::optim
