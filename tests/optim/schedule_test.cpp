#include "cairn/optim/schedule.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cairn::optim
