#include "cairn/amp/loss_scaler.h"

#include <gtest/gtest.h>

#include <random>

#include "support.h"

namespace cairn::amp {
namespace {

TEST(LossScaler, FollowsTheRuleOverRandomTraces) {
  std::mt19937 random(11);
  for (const std::int64_t interval : {1, 3, 20}) {
    for (const double rate : {0.0, 0.05, 0.5, 1.0}) {
      for (const int hysteresis : {1, 3}) {
        const LossScalerOptions options{.growth_interval = interval, .hysteresis = hysteresis};
        LossScaler scaler(options);
        ScaleReference expected(options);
        std::bernoulli_distribution overflows(rate);
        for (int step = 0; step < 2000; ++step) {
          const bool overflow = overflows(random);
          scaler.update(overflow);
          expected.update(overflow);
          ASSERT_EQ(scaler.scale(), expected.value)
              << "step " << step << ", interval " << interval << ", rate " << rate;
          ASSERT_EQ(scaler.state_dict().integer("unskipped"), expected.clean);
        }
      }
    }
  }
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
       {.init_scale = 1000, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 2},
       "oo..",
       {250, 62.5, 62.5, 187.5}},
      {"consecutive hysteresis forgives overflows in a row",
       {.init_scale = 1024, .growth_interval = 100, .min_scale = 200, .hysteresis = 3},
       "oooo.ooo",
       {1024, 1024, 512, 256, 256, 256, 256, 200}},
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

TEST(LossScaler, RejectsImpossibleOptions) {
  const std::vector<LossScalerOptions> impossible = {{.init_scale = 0},
                                                     {.init_scale = kNaN},
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
  torch.set("scale", 4096.0);
  torch.set("growth_factor", 2.0);
  torch.set("backoff_factor", 0.5);
  torch.set("growth_interval", std::int64_t{2000});
  torch.set("_growth_tracker", std::int64_t{7});
  LossScaler scaler;
  scaler.load_state_dict(torch);
  EXPECT_EQ(scaler.scale(), 4096);
  EXPECT_EQ(scaler.state_dict().integer("unskipped"), 7);
  EXPECT_EQ(test::flat(scaler.torch_state_dict()), test::flat(torch));
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
