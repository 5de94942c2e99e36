#include "cairn/amp/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

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

TEST(LossScaler, HasTheDefaultsOfApex) {
  LossScaler scaler;
  EXPECT_EQ(scaler.scale(), 65536.0);
  for (int step = 0; step < 1999; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 65536.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072.0);
  EXPECT_EQ(LossScaler({.init_scale = 1e9}).scale(), 16777216.0);
}

struct Trace {
  const char* what;
  LossScalerOptions options;
  const char* steps;  // o: an overflow
  std::vector<double> scales;
};

TEST(LossScaler, FollowsItsOptions) {
  const std::vector<Trace> traces = {
      {"other factors",
       {.init_scale = 1000,
        .growth_factor = 3,
        .backoff_factor = 0.25,
        .growth_interval = 2,
        .min_scale = 100},
       "oo..",
       {250, 100, 100, 300}},
      {"consecutive hysteresis forgives overflows in a row",
       {.init_scale = 1024, .growth_interval = 100, .hysteresis = 3},
       "oooo.ooo",
       {1024, 1024, 512, 256, 256, 256, 256, 128}},
      {"other hysteresis refills when the scale grows",
       {.init_scale = 1024, .growth_interval = 2, .hysteresis = 2, .consecutive_hysteresis = false},
       "o.oo..oo",
       {1024, 1024, 512, 256, 256, 512, 512, 256}},
      {"a forgiven overflow restarts the count too",
       {.init_scale = 1024, .growth_interval = 2, .hysteresis = 2},
       ".o..",
       {1024, 1024, 1024, 2048}}};
  for (const Trace& trace : traces) {
    LossScaler scaler(trace.options);
    for (std::size_t i = 0; i < trace.scales.size(); ++i) {
      scaler.update(trace.steps[i] == 'o');
      EXPECT_EQ(scaler.scale(), trace.scales[i]) << trace.what << ", step " << i;
    }
  }
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
  const std::vector<LossScalerOptions> impossible = {{.init_scale = 0},
                                                     {.init_scale = nan},
                                                     {.growth_factor = 0.5},
                                                     {.backoff_factor = 0},
                                                     {.backoff_factor = 1.5},
                                                     {.growth_interval = 0},
                                                     {.min_scale = 8, .max_scale = 4},
                                                     {.hysteresis = 0}};
  for (std::size_t i = 0; i < impossible.size(); ++i) {
    EXPECT_THROW(LossScaler{impossible[i]}, core::InvalidArgument) << i;
  }
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

TEST(LossScaler, HysteresisIsSaved) {
  const LossScalerOptions options{.init_scale = 1024, .hysteresis = 3};
  LossScaler saved(options), loaded(options);
  for (int overflow = 0; overflow < 2; ++overflow) saved.update(true);
  loaded.load_state_dict(saved.state_dict());
  loaded.update(true);
  EXPECT_EQ(loaded.scale(), 512);
}

TEST(LossScaler, ReadsAndWritesTorchsState) {
  StateDict torch;  // as torch.amp.GradScaler().state_dict() after 7 steps
  const std::map<std::string, double> numbers = {
      {"scale", 4096.0}, {"growth_factor", 2.0}, {"backoff_factor", 0.5}};
  const std::map<std::string, std::int64_t> integers = {{"growth_interval", 2000},
                                                        {"_growth_tracker", 7}};
  for (const auto& [key, value] : numbers) torch.set(key, value);
  for (const auto& [key, value] : integers) torch.set(key, value);
  LossScaler scaler;
  scaler.load_state_dict(torch);
  EXPECT_EQ(scaler.scale(), 4096);
  EXPECT_EQ(scaler.state_dict().integer("unskipped"), 7);
  const StateDict back = scaler.torch_state_dict();
  ASSERT_EQ(back.size(), torch.size());
  for (const auto& [key, value] : numbers) EXPECT_EQ(back.number(key), value) << key;
  for (const auto& [key, value] : integers) EXPECT_EQ(back.integer(key), value) << key;
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

}  // namespace
}  // namespace cairn::amp
