#include "cairn/amp/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "cairn/core/error.h"

namespace cairn::amp {
namespace {

/// The rule in exponents of two and a list of what happened, independent of the scaler's counters.
struct SimulatedScaler {
  int exponent, least, most;
  std::int64_t interval;
  std::vector<bool> clean;  // steps since the scale last changed or overflowed

  void update(bool overflow) {
    if (overflow) {
      exponent = std::max(least, exponent - 1);
      clean.clear();
      return;
    }
    clean.push_back(true);
    if (static_cast<std::int64_t>(clean.size()) == interval) {
      exponent = std::min(most, exponent + 1);
      clean.clear();
    }
  }
};

TEST(LossScaler, FollowsTheRuleOverRandomTraces) {
  std::mt19937 random(11);
  for (const std::int64_t interval : {1, 3, 20}) {
    for (const double rate : {0.0, 0.05, 0.5, 1.0}) {
      LossScaler scaler({.growth_interval = interval});
      SimulatedScaler expected{16, 0, 24, interval, {}};
      std::bernoulli_distribution overflows(rate);
      for (int step = 0; step < 2000; ++step) {
        const bool overflow = overflows(random);
        scaler.update(overflow);
        expected.update(overflow);
        ASSERT_EQ(scaler.scale(), std::ldexp(1.0, expected.exponent))
            << "step " << step << ", interval " << interval << ", rate " << rate;
        ASSERT_EQ(scaler.state_dict().integer("unskipped"),
                  static_cast<std::int64_t>(expected.clean.size()));
      }
    }
  }
}

TEST(LossScaler, GrowsAfterExactlyTheIntervalByDefault) {
  LossScaler scaler;
  EXPECT_EQ(scaler.scale(), 65536.0);
  for (int step = 0; step < 1999; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 65536.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072.0);
}

TEST(LossScaler, OverflowRestartsTheCount) {
  LossScaler scaler({.growth_interval = 4});
  for (int step = 0; step < 3; ++step) scaler.update(false);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 32768.0);
  for (int step = 0; step < 3; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 32768.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 65536.0);
}

TEST(LossScaler, StaysWithinFloorAndCeiling) {
  LossScaler scaler({.growth_interval = 1});
  for (int step = 0; step < 100; ++step) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1.0);
  for (int step = 0; step < 100; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 16777216.0);
  EXPECT_EQ(LossScaler({.init_scale = 1e9}).scale(), 16777216.0);
}

TEST(LossScaler, OtherFactors) {
  LossScaler scaler({.init_scale = 1000,
                     .growth_factor = 3,
                     .backoff_factor = 0.25,
                     .growth_interval = 2,
                     .min_scale = 100});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 250.0);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 100.0);
  scaler.update(false);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 300.0);
}

TEST(LossScaler, StaticNeverChanges) {
  LossScaler scaler({.dynamic = false, .init_scale = 0.125});
  for (int step = 0; step < 3000; ++step) scaler.update(step % 7 == 0);
  EXPECT_EQ(scaler.scale(), 0.125);
}

TEST(LossScaler, ContinuesFromItsState) {
  LossScaler scaler({.growth_interval = 5});
  for (const bool overflow : {true, false, false, true, false, false, false}) {
    scaler.update(overflow);
  }
  LossScaler resumed({.growth_interval = 5});
  resumed.load_state_dict(scaler.state_dict());
  for (int step = 0; step < 20; ++step) {
    scaler.update(step == 13);
    resumed.update(step == 13);
    EXPECT_EQ(resumed.scale(), scaler.scale()) << step;
  }
}

TEST(LossScaler, RejectsImpossibleOptions) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(LossScaler({.init_scale = 0}), core::InvalidArgument);
  EXPECT_THROW(LossScaler({.init_scale = nan}), core::InvalidArgument);
  EXPECT_THROW(LossScaler({.growth_factor = 0.5}), core::InvalidArgument);
  EXPECT_THROW(LossScaler({.backoff_factor = 0}), core::InvalidArgument);
  EXPECT_THROW(LossScaler({.backoff_factor = 1.5}), core::InvalidArgument);
  EXPECT_THROW(LossScaler({.growth_interval = 0}), core::InvalidArgument);
  EXPECT_THROW(LossScaler({.min_scale = 8, .max_scale = 4}), core::InvalidArgument);
}

TEST(LossScaler, ADamagedStateChangesNothing) {
  LossScaler scaler;
  StateDict state;
  state.set("loss_scale", 0.0);
  state.set("unskipped", std::int64_t{1});
  EXPECT_THROW(scaler.load_state_dict(state), core::DataError);
  state.set("loss_scale", 8.0);
  state.set("unskipped", std::int64_t{-1});
  EXPECT_THROW(scaler.load_state_dict(state), core::DataError);
  EXPECT_THROW(scaler.load_state_dict({}), core::DataError);
  EXPECT_EQ(scaler.scale(), 65536.0);
}

TEST(LossScaler, ConsecutiveHysteresisForgivesOverflowsInARow) {
  LossScaler scaler({.init_scale = 1024, .growth_interval = 100, .hysteresis = 3});
  for (const double expected : {1024.0, 1024.0, 512.0, 256.0}) {
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), expected);
  }
  scaler.update(false);
  for (const double expected : {256.0, 256.0, 128.0}) {
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), expected);
  }
}

TEST(LossScaler, OtherHysteresisRefillsWhenTheScaleGrows) {
  LossScaler scaler(
      {.init_scale = 1024, .growth_interval = 2, .hysteresis = 2, .consecutive_hysteresis = false});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1024);
  scaler.update(false);  // does not refill
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 512);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 256);
  scaler.update(false);
  scaler.update(false);  // grows, refills
  EXPECT_EQ(scaler.scale(), 512);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 512);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 256);
}

TEST(LossScaler, HysteresisIsSaved) {
  const LossScalerOptions options{.init_scale = 1024, .hysteresis = 3};
  LossScaler saved(options), loaded(options);
  saved.update(true);
  saved.update(true);
  loaded.load_state_dict(saved.state_dict());
  loaded.update(true);
  EXPECT_EQ(loaded.scale(), 512);
}

TEST(LossScaler, ReadsAndWritesTorchsState) {
  StateDict torch;  // as torch.amp.GradScaler().state_dict() after 7 steps
  torch.set("scale", 4096.0);
  torch.set("growth_factor", 2.0);
  torch.set("backoff_factor", 0.5);
  torch.set("growth_interval", std::int64_t{2000});
  torch.set("_growth_tracker", std::int64_t{7});
  LossScaler scaler;
  scaler.load_state_dict(torch);
  EXPECT_EQ(scaler.scale(), 4096);
  EXPECT_EQ(scaler.state_dict().integer("unskipped"), 7);
  const StateDict back = scaler.torch_state_dict();
  ASSERT_EQ(back.size(), torch.size());
  for (const char* key : {"scale", "growth_factor", "backoff_factor"}) {
    EXPECT_EQ(back.number(key), torch.number(key)) << key;
  }
  EXPECT_EQ(back.integer("growth_interval"), 2000);
  EXPECT_EQ(back.integer("_growth_tracker"), 7);
}

TEST(LossScaler, AForgivenOverflowRestartsTheCountToo) {
  LossScaler scaler({.init_scale = 1024, .growth_interval = 2, .hysteresis = 2});
  for (const bool overflow : {false, true, false}) scaler.update(overflow);
  EXPECT_EQ(scaler.scale(), 1024.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 2048.0);
}

TEST(LossScaler, AStateBeyondTheOptionsIsTakenAsFarAsTheyGo) {
  LossScaler scaler({.init_scale = 1024, .max_scale = 4096, .hysteresis = 2});
  StateDict state = scaler.state_dict();
  state.set("loss_scale", 1e6);
  state.set("overflows_left", std::int64_t{5});
  scaler.load_state_dict(state);
  EXPECT_EQ(scaler.scale(), 4096.0);
  for (int overflow = 0; overflow < 2; ++overflow) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 2048.0);
}

TEST(LossScaler, RefusesAnImpossibleHysteresis) {
  EXPECT_THROW(LossScaler({.hysteresis = 0}), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::amp
