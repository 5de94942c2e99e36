#include "cairn/optim/schedule.h"

#include <gtest/gtest.h>

#include <limits>

#include "cairn/core/error.h"
#include "cairn/optim/sgd.h"
#include "support/golden.h"

namespace cairn::optim {
namespace {

Tensor parameter() {
  return Tensor::zeros({2}).set_requires_grad(true);
}

void expect_curve(const Curve& curve, const std::string& name) {
  const std::vector<double> expected = test::Golden("optim").values("schedule." + name);
  ASSERT_FALSE(expected.empty());
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_NEAR(curve(static_cast<std::int64_t>(step)), expected[step], 1e-12)
        << name << " " << step;
  }
}

TEST(Curve, EqualsPyTorch) {
  expect_curve(step_decay(7, 0.3), "step_decay");
  expect_curve(cosine(30, 0.1), "cosine");
  expect_curve(linear(20, 0.2), "linear");
}

/// Of torch 2.15: OneCycleLR(max_lr=1, total_steps=10), OneCycleLR(1, total_steps=11, pct_start=.5,
/// div_factor=10, final_div_factor=100), CosineAnnealingWarmRestarts(3, 2, .1).
TEST(Curve, OneCycleAndRestartsEqualPyTorch) {
  const auto expect = [](const Curve& curve, const std::vector<double>& expected) {
    for (std::size_t step = 0; step < expected.size(); ++step)
      EXPECT_NEAR(curve(static_cast<std::int64_t>(step)), expected[step], 1e-9) << step;
  };
  expect(one_cycle(10), {0.04, 0.52, 1, 0.950484632, 0.811745654, 0.611262022, 0.388741978,
                         0.188258346, 0.049519368, 4e-06, 4e-06});
  expect(one_cycle(11, {.rising = 0.5, .start_factor = 0.1, .final_factor = 0.001}),
         {0.1, 0.205280001, 0.47185832, 0.775, 0.972861679, 0.97976674, 0.827602937, 0.571586262,
          0.293000201, 0.0802938604, 0.001});
  expect(cosine_restarts(3, 2, 0.1), {1, 0.775, 0.325, 1, 0.939711432, 0.775, 0.55, 0.325,
                                      0.160288568, 1, 0.984666622, 0.939711432});
  expect(cosine_restarts(2), {1, 0.5, 1, 0.5, 1});
}

TEST(Curve, Composes) {
  EXPECT_DOUBLE_EQ(cosine(10, 0.25)(10), 0.25);
  EXPECT_DOUBLE_EQ(cosine(10, 0.25)(1000), 0.25);  // ends stay constant
  EXPECT_DOUBLE_EQ(linear(10)(11), 0.0);
  const Curve curve = warm_up(3, cosine(10));
  EXPECT_DOUBLE_EQ(curve(0), 0.25);
  EXPECT_DOUBLE_EQ(curve(2), 0.75);
  EXPECT_DOUBLE_EQ(curve(3), 1.0);
  EXPECT_DOUBLE_EQ(curve(8), cosine(10)(5));
  EXPECT_DOUBLE_EQ(then(constant(2), 4, constant(3))(3), 2.0);
  EXPECT_DOUBLE_EQ(then(constant(2), 4, constant(3))(4), 3.0);
  EXPECT_DOUBLE_EQ(scaled(constant(2), step_decay(1, 0.5))(3), 0.25);
  EXPECT_DOUBLE_EQ(warm_up(0)(0), 1.0);
}

TEST(Curve, RejectsImpossibleLengths) {
  EXPECT_THROW(step_decay(0), core::InvalidArgument);
  EXPECT_THROW(cosine(0), core::InvalidArgument);
  EXPECT_THROW(linear(-1), core::InvalidArgument);
  EXPECT_THROW(warm_up(-1), core::InvalidArgument);
  EXPECT_THROW(step_decay(3, -0.5), core::InvalidArgument);
}

TEST(Schedule, DrivesEveryGroupOnAppliedStepsOnly) {
  FusedSGD optimizer({{{{"a", parameter()}}, 0.5, 0}, {{{"b", parameter()}}, 4.0, 0}}, {});
  Schedule schedule(optimizer, step_decay(2, 0.1));
  StepResult applied, skipped;
  skipped.applied = false;
  for (int i = 0; i < 5; ++i) schedule.step(skipped);
  EXPECT_EQ(schedule.position(), 0);
  EXPECT_DOUBLE_EQ(optimizer.lr(), 0.5);
  schedule.step(applied);
  schedule.step(skipped);
  schedule.step(applied);
  EXPECT_EQ(schedule.position(), 2);
  EXPECT_DOUBLE_EQ(optimizer.groups()[0].lr, 0.05);
  EXPECT_DOUBLE_EQ(optimizer.groups()[1].lr, 0.4);
}

TEST(Schedule, ResumesInAnyOrderWithTheOptimizer) {
  FusedSGD optimizer({{"a", parameter()}}, {.lr = 0.7});
  Schedule schedule(optimizer, warm_up(5, cosine(20)));
  for (int i = 0; i < 8; ++i) schedule.step({});
  const StateDict state = schedule.state_dict(), rates = optimizer.state_dict();
  const double saved = optimizer.lr();
  schedule.step({});
  for (const bool schedule_first : {true, false}) {
    FusedSGD other({{"a", parameter()}}, {.lr = 0.1});
    Schedule resumed(other, warm_up(5, cosine(20)));
    if (schedule_first) resumed.load_state_dict(state);
    other.load_state_dict(rates);
    if (!schedule_first) resumed.load_state_dict(state);
    EXPECT_EQ(other.lr(), saved);
    resumed.step({});
    EXPECT_EQ(other.lr(), optimizer.lr());
  }
}

TEST(Schedule, RejectsAStateOfOtherGroups) {
  FusedSGD one({{"a", parameter()}}, {.lr = 0.7});
  FusedSGD two({{{{"a", parameter()}}, 0.5, 0}, {{{"b", parameter()}}, 4.0, 0}}, {});
  Schedule schedule(one, constant()), other(two, constant());
  EXPECT_THROW(schedule.load_state_dict(other.state_dict()), core::DataError);
  EXPECT_DOUBLE_EQ(one.lr(), 0.7);
}

/// Of torch 2.15's ReduceLROnPlateau(factor=.5, patience=1, threshold=.01, cooldown=1, min_lr=.2).
TEST(ReduceOnPlateau, LowersAsPyTorchAndResumes) {
  const std::vector<double> metrics{5,    4,   4,   3.99, 3.99,
                                    3.99, 3.0, 3.0, 3.0,  3.0,
                                    3,    3,   3,   2.0,  std::numeric_limits<double>::quiet_NaN(),
                                    2,    2,   2};
  const std::vector<double> rates{1,    1,    1,   0.5, 0.5, 0.5, 0.5, 0.5, 0.25,
                                  0.25, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2};
  const PlateauOptions options{
      .factor = 0.5, .patience = 1, .threshold = 0.01, .cooldown = 1, .smallest_lr = 0.2};
  for (const bool accuracy : {false, true}) {
    FusedSGD optimizer({{{{"a", parameter()}}, 1.0, 0}}, {});
    PlateauOptions own = options;
    own.higher_is_better = accuracy;
    auto plateau = std::make_unique<ReduceOnPlateau>(optimizer, own);
    for (std::size_t i = 0; i < metrics.size(); ++i) {
      const StateDict saved = plateau->state_dict();
      plateau = std::make_unique<ReduceOnPlateau>(optimizer, own);
      plateau->load_state_dict(saved);
      const bool lowered = plateau->step(accuracy ? -metrics[i] : metrics[i]);
      EXPECT_NEAR(optimizer.lr(), rates[i], 1e-12) << i;
      EXPECT_EQ(lowered, i > 0 && rates[i] < rates[i - 1]) << i;
    }
    EXPECT_EQ(plateau->best(), accuracy ? -2 : 2);
  }
}

TEST(ReduceOnPlateau, RejectsWhatMakesNoSense) {
  FusedSGD optimizer({{"a", parameter()}}, {});
  EXPECT_THROW(ReduceOnPlateau(optimizer, {.factor = 1}), core::InvalidArgument);
  EXPECT_THROW(ReduceOnPlateau(optimizer, {.patience = -1}), core::InvalidArgument);
  EXPECT_THROW(ReduceOnPlateau(optimizer, {.threshold = -1}), core::InvalidArgument);
  ReduceOnPlateau plateau(optimizer);
  StateDict state = plateau.state_dict();
  state.set("waited", std::int64_t{-1});
  EXPECT_THROW(plateau.load_state_dict(state), core::DataError);
  EXPECT_THROW(one_cycle(1), core::InvalidArgument);
  EXPECT_THROW(one_cycle(10, {.rising = 1}), core::InvalidArgument);
  EXPECT_THROW(cosine_restarts(3, 0), core::InvalidArgument);
}

/// As Lightning's EarlyStopping(patience=3, check_finite=False).
TEST(EarlyStopping, StopsAfterThePatienceAndResumes) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> losses{3, 2, 2, 2.5, 1.9, nan, 2, 1.9, 1};
  const std::vector<bool> stops{false, false, false, false, false, false, false, true, false};
  for (const bool accuracy : {false, true}) {
    const EarlyStoppingOptions options{.patience = 3, .higher_is_better = accuracy};
    EarlyStopping stopping(options);
    for (std::size_t i = 0; i < losses.size(); ++i) {
      EarlyStopping resumed(options);
      resumed.load_state_dict(stopping.state_dict());
      EXPECT_EQ(resumed.stopped(), i > 0 && stops[i - 1]) << i;
      EXPECT_EQ(resumed.step(accuracy ? -losses[i] : losses[i]), stops[i]) << i;
      stopping = resumed;
    }
    EXPECT_EQ(stopping.best(), accuracy ? -1 : 1);
  }
}

TEST(EarlyStopping, AsksForMoreThanTheThreshold) {
  EarlyStopping stopping({.patience = 1, .threshold = 0.1});
  EXPECT_FALSE(stopping.step(100));
  EXPECT_FALSE(stopping.step(89));
  EXPECT_TRUE(stopping.step(81));
}

TEST(EarlyStopping, RejectsWhatMakesNoSense) {
  EXPECT_THROW(EarlyStopping({.patience = 0}), core::InvalidArgument);
  EXPECT_THROW(EarlyStopping({.threshold = -0.1}), core::InvalidArgument);
  EarlyStopping stopping;
  EXPECT_FALSE(stopping.step(5));
  StateDict state = stopping.state_dict();
  state.set("waited", std::int64_t{-1});
  state.set("best", 1.0);
  EXPECT_THROW(stopping.load_state_dict(state), core::DataError);
  EXPECT_EQ(stopping.best(), 5);
}

}  // namespace
}  // namespace cairn::optim
