// Several losses and optimizers: scales of their own, who skips, what is refused, how often the
// host waits.
#include <gmock/gmock.h>

#include "support.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

class Losses : public testing::TestWithParam<OptLevel> {
 protected:
  Options options() const {
    return {.opt_level = GetParam(),
            .dynamic_loss_scale = true,
            .scaler = {.init_scale = 1024},
            .num_losses = 2};
  }
};

TEST_P(Losses, GradientsOfDifferentScalesAddUpUnscaled) {
  One run(options());
  set_two_scales(run.precision);
  EXPECT_EQ(run.precision.loss_scale(1), 16.0);
  // Loss 0, 1, 0, 1: each contribution counts once, at its own scale.
  for (const double value : {0.25, 0.125}) {
    run.backward(value, {.loss_id = 0});
    run.backward(2 * value, {.loss_id = 1});
  }
  expect_applied(run.precision.step());
  EXPECT_EQ(run.model.value(), 1.0 - 3 * 0.375);
}

TEST_P(Losses, OnlyTheLossThatOverflowedIsScaledDown) {
  for (const int bad : {0, 1}) {
    One run(options());
    for (const int id : {0, 1}) run.backward(id == bad ? kInf : 0.25, {.loss_id = id});
    const optim::StepResult result = run.precision.step();
    EXPECT_FALSE(result.applied);
    EXPECT_THAT(result.reason, HasSubstr(core::str("loss ", bad, ": ")));
    EXPECT_EQ(run.precision.loss_scale(bad), 512.0);
    EXPECT_EQ(run.precision.loss_scale(1 - bad), 1024.0);
    EXPECT_EQ(run.precision.overflows().back().loss_id, bad);
    expect_applied(run.train(0.25, {.loss_id = bad}));  // nothing of the skipped step is left
    EXPECT_EQ(run.model.value(), 0.75);
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Losses, testing::ValuesIn(kLevels),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(SeveralOptimizers, EachStepsForItselfAndWaitsOnce) {
  Pair pair(with_losses(3));
  for (int step = 0; step < 3; ++step) {
    pair.backward_a(0.125, 0);
    pair.backward_a(0.125, 1);
    expect_applied(pair.step_a());
    pair.backward_b(0.25, 2);
    expect_applied(pair.step_b());
  }
  EXPECT_EQ(pair.a.value(), 0.25);
  EXPECT_EQ(pair.b.value(), 0.25);
}

TEST(SeveralOptimizers, AnOverflowSkipsThoseThatItsLossReached) {
  Pair pair;
  pair.backward(kInf, 0.25);
  EXPECT_FALSE(pair.step_a().applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
  const optim::StepResult b = pair.step_b();
  EXPECT_FALSE(b.applied);
  EXPECT_THAT(b.reason, HasSubstr("in the step of another optimizer"));
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);  // counted once
  pair.backward(0.25, 0.25);
  expect_applied(pair.step_a());
  expect_applied(pair.step_b());

  pair.backward_a(kInf);
  pair.backward_b(0.25);
  EXPECT_FALSE(pair.step_a().applied);
  expect_applied(pair.step_b());
}

TEST(SeveralOptimizers, OneStepForAllTellsOfAll) {
  Pair pair;
  pair.backward_a(kInf);
  pair.backward_b(0.25);
  EXPECT_FALSE(pair.precision.step().applied);
  EXPECT_EQ(pair.a.value(), 1.0);
  EXPECT_EQ(pair.b.value(), 0.75);
}

TEST(SeveralOptimizers, AStrangerIsRefused) {
  Pair pair;
  Weight other;
  optim::FusedSGD stranger(other.parameters(), {});
  const Tensor loss = pair.a.loss(1);
  const auto scale = [&](const LossOptions& options) {
    (void)pair.precision.scale_loss(loss, options);
  };
  EXPECT_THROW((void)pair.precision.step(stranger), core::InvalidArgument);
  EXPECT_THROW(scale({.optimizers = {&stranger}}), core::InvalidArgument);
  EXPECT_THROW(scale({.loss_id = 2}), core::InvalidArgument);
  EXPECT_THROW(scale({.weight = kInf}), core::InvalidArgument);
  EXPECT_THROW(pair.precision.loss_scale(-1), core::InvalidArgument);
}

TEST(Delays, ADelayedOverflowCountsOnceAndLater) {
  One run;
  EXPECT_FALSE(run.train(kInf, {.delay_overflow_check = true}).applied);
  EXPECT_EQ(run.precision.loss_scale(), 1024.0);
  for (int step = 0; step < 3; ++step) {
    expect_applied(run.train(0.25));
    EXPECT_EQ(run.precision.loss_scale(), 512.0) << step;
  }
}

TEST(Delays, ADelayedOverflowEndsWithALoad) {
  One run;
  const StateDict before = run.precision.state_dict();
  EXPECT_FALSE(run.train(kInf, {.delay_overflow_check = true}).applied);
  run.precision.load_state_dict(before);
  expect_applied(run.train(0.25));
  EXPECT_EQ(run.precision.loss_scale(), 1024.0);
}

TEST(RetainGraph, LetsALossRunBackwardTwice) {
  for (const OptLevel level : kLevels) {
    One run({.opt_level = level, .scaler = {.init_scale = 1024}});
    const Tensor loss = run.model.loss(0.25);
    run.precision.backward(loss, {.retain_graph = true});
    run.precision.scale_loss(loss, {.retain_graph = true}).backward();
    run.precision.backward(loss);
    expect_applied(run.precision.step());
    EXPECT_EQ(run.model.value(), 0.25) << name(level);
    EXPECT_THAT(message_of<core::Error>([&] { run.precision.backward(loss); }),
                HasSubstr("released"));
  }
}

}  // namespace
}  // namespace cairn::amp
