// What a trainer may do between a backward and its step: errors that are caught, unchecked steps of
// rules that look at norms, groups and states that come in between.
#include <gmock/gmock.h>

#include <memory>

#include "cairn/optim/lamb.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/schedule.h"
#include "support.h"
#include "support/fake_world.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

TEST(Misuse, AnErrorThatIsCaughtSkipsNoFurtherStep) {
  One run;
  run.backward(kInf);
  EXPECT_THROW((void)run.precision.step({.error_if_nonfinite = true}), core::Error);
  EXPECT_EQ(run.precision.loss_scale(), 512.0);
  run.optimizer.clear_grad();
  expect_applied(run.train(0.25));
  EXPECT_EQ(run.model.value(), 0.75);
}

TEST(Misuse, AStaticScaleMayGoUncheckedWhateverTheRuleLooksAt) {
  One plain({.opt_level = OptLevel::O2, .loss_scale = 8}), dynamic;
  plain.backward(kInf);
  expect_applied(plain.precision.step({.check = false}));
  EXPECT_THROW((void)dynamic.precision.step({.check = false}), core::InvalidArgument);
  for (const int rule : {0, 1, 2}) {
    SCOPED_TRACE(rule);
    Weight model;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<optim::LARC> larc;
    if (rule == 0) optimizer = std::make_unique<optim::FusedLAMB>(model.parameters());
    if (rule == 1) optimizer = std::make_unique<optim::FusedNovoGrad>(model.parameters());
    if (rule == 2) {
      optimizer = std::make_unique<optim::FusedSGD>(model.parameters());
      larc = std::make_unique<optim::LARC>(*optimizer);
    }
    Amp precision = initialize(model, *optimizer, {.opt_level = OptLevel::O2, .loss_scale = 128.0});
    precision.backward(model.loss(0.25));
    expect_applied(precision.step({.check = false}));
    EXPECT_LT(model.value(), 1.0);
  }
}

TEST(Misuse, TheNormOfAllOptimizersIsOfTheTypeAskedFor) {
  for (const auto& [type, expected] : {std::pair{1.0, 28.0}, {2.0, 10.0}, {kInf, 4.0}}) {
    Pair pair(kO2);
    pair.backward(3.0, 4.0);
    EXPECT_NEAR(pair.precision.step({.norm_type = type}).gradient_norm, expected, 1e-12);
  }
}

TEST(Misuse, OneLossOfTwoOptimizersCountsOnce) {
  Options options = kO2;
  options.scaler.growth_interval = 4;
  Pair pair(options);
  const auto step_both = [&](double b_coefficient) {
    pair.backward(0.125, b_coefficient);
    const bool a_applied = pair.step_a().applied;
    const optim::StepResult b = pair.step_b();
    EXPECT_EQ(a_applied, b.applied);
    return b.reason;
  };
  for (int step = 0; step < 4; ++step) EXPECT_EQ(step_both(0.125), "");
  EXPECT_EQ(pair.precision.loss_scale(), 2048.0);
  EXPECT_THAT(step_both(kInf), HasSubstr("inf in the gradient of w (4 elements)"));
  EXPECT_EQ(pair.precision.loss_scale(), 1024.0);
  EXPECT_EQ(step_both(0.125), "");
  EXPECT_EQ(pair.a.value(), 1.0 - 5 * 0.125);
  EXPECT_EQ(pair.b.value(), 1.0 - 5 * 0.125);
}

TEST(Misuse, AGroupMayComeBetweenBackwardAndStep) {
  Weight a, b;
  optim::FusedSGD optimizer(a.parameters(), {.lr = 1.0});
  Amp precision = initialize({&a, &b}, {&optimizer}, with_losses(2));
  precision.backward(a.loss(0.25), {.loss_id = 0});
  precision.backward(autograd::add(a.loss(0.25), b.loss(0.25)), {.loss_id = 1});
  optimizer.add_group({.parameters = {{"b", b.w()}}, .lr = 1.0, .momentum = 0.5});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(a.value(), 0.5);
  EXPECT_EQ(b.value(), 0.75);
}

TEST(Misuse, AStateLoadedBetweenBackwardAndStepEndsTheBackward) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0, .momentum = 0.5});
  Amp precision = initialize(model, optimizer, kO2);
  const StateDict fresh = snapshot(optimizer.state_dict());
  precision.backward(model.loss(0.25));
  EXPECT_TRUE(precision.step().applied);
  precision.backward(model.loss(0.25));
  optimizer.load_state_dict(fresh);  // no momentum
  EXPECT_FALSE(precision.step().applied);
  precision.backward(model.loss(0.25));
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(model.value(), 0.5);
}

TEST(Misuse, ABackwardThatThrowsLeavesNothingBehindOnceCleared) {
  Classifier run(kO2), other(kO2);
  const Tensor loss = loss_of(run.model, make_batch(1));
  loss_of(other.model, make_batch(1));  // the same running statistics
  run.precision.backward(loss);
  EXPECT_THROW(run.precision.backward(loss), core::Error);  // its graph is gone
  run.optimizer.clear_grad();
  run.train(1, 4);
  other.train(1, 4);
  EXPECT_EQ(run.everything(), other.everything());
}

TEST(Misuse, FrozenParametersRemaindersAndOptionsThatChangeMidway) {
  nn::Sequential model = make_model();
  Tensor frozen = model.parameters().front().tensor;
  const Tensor last = model.parameters().back().tensor;
  frozen.set_requires_grad(false);
  Classifier run({.opt_level = OptLevel::O2, .half_dtype = DType::bf16}, {.lr = 1e-2},
                 std::move(model),
                 {.moments = DType::bf16, .masters = optim::MasterStorage::remainder});
  const Values before = values(frozen);
  run.train(1, 2);
  EXPECT_EQ(values(frozen), before);
  EXPECT_EQ(test::kept_as(frozen), optim::MasterStorage::remainder);

  const Values truth = exact(last);
  run.optimizer.set_state_options({});
  EXPECT_EQ(exact(last), truth);
  run.train(2, 3);
  EXPECT_EQ(test::kept_as(last), optim::MasterStorage::f32);
  run.optimizer.set_state_options({.masters = optim::MasterStorage::remainder});
  frozen.set_requires_grad(true);
  run.train(3, 5);
  EXPECT_EQ(test::kept_as(last), optim::MasterStorage::remainder);
  EXPECT_NE(values(frozen), before);
}

TEST(Misuse, CleanStepsOfAnotherLossDoNotStopAFallback) {
  nn::Sequential bad(nn::Linear(4, 4)), good(nn::Linear(4, 4));
  kernels::fill(bad.parameters().front().tensor, 3.0);
  optim::FusedSGD bad_optimizer(bad.parameters()), good_optimizer(good.parameters());
  Options options = with_losses(2);
  options.fallback_after = 3;
  Amp precision = initialize({&bad, &good}, {&bad_optimizer, &good_optimizer}, options);
  const auto train = [&](int id, nn::Module& model, optim::Optimizer& optimizer, double x) {
    precision.backward(autograd::mean(model(Tensor::full({2, 4}, x))),
                       {.loss_id = id, .optimizers = {&optimizer}});
    return precision.step(optimizer).applied;
  };
  for (int step = 0; step < 4; ++step) {
    EXPECT_FALSE(train(0, bad, bad_optimizer, 6e4));
    EXPECT_TRUE(train(1, good, good_optimizer, 0.1));
  }
  EXPECT_EQ(precision.fp32_layers(), std::vector<std::string>{"0/0"});
  EXPECT_TRUE(train(0, bad, bad_optimizer, 6e4));
}

TEST(Misuse, LossesMayBeScaledBeforeAnyOfThemGoesBackward) {
  for (const int bad : {0, 1}) {
    TwoScales run;
    for (int step = 0; step < 3; ++step) {
      const bool overflows = step == 1;
      const auto coefficient = [&](int id) { return overflows && id == bad ? kInf : 0.125; };
      const auto scaled = [&](int id) {
        return run.precision.scale_loss(run.model.loss(coefficient(id)), {.loss_id = id});
      };
      const ScaledLoss first = scaled(0), second = scaled(1);
      first.backward();
      second.backward();
      EXPECT_EQ(run.precision.step().applied, !overflows);
    }
    EXPECT_EQ(run.precision.loss_scale(0), bad == 0 ? 512.0 : 1024.0);
    EXPECT_EQ(run.precision.loss_scale(1), bad == 1 ? 8.0 : 16.0);
    EXPECT_EQ(run.model.value(), 0.5);
  }
}

TEST(Misuse, AGradientInTwoPartsIsNotHandedOut) {
  TwoScales run;
  run.backward(0.5, {.loss_id = 0});
  run.backward(0.25, {.loss_id = 1});
  EXPECT_THAT(message_of([&] { (void)run.model.w().grad(); }),
              testing::AllOf(HasSubstr("'w'"), HasSubstr("unscale")));
  EXPECT_EQ(values(run.precision.unscaled_gradient(run.model.w())), Values(4, 0.75));
}

TEST(Misuse, UnscaledGradientsMayBeClippedByHand) {
  for (const bool several : {false, true}) {
    TwoScales run;
    run.backward(0.5, {.loss_id = 0});
    if (several) run.backward(0.25, {.loss_id = 1});
    run.precision.unscale(run.optimizer);
    const Tensor gradient = run.model.w().grad();
    EXPECT_EQ(gradient.dtype(), DType::f32);
    EXPECT_EQ(values(gradient), Values(4, several ? 0.75 : 0.5));
    kernels::fill(gradient, 0.25);
    EXPECT_TRUE(run.precision.step().applied);
    EXPECT_EQ(run.model.value(), 0.75);
    EXPECT_FALSE(run.model.w().grad().defined());
  }
}

TEST(Misuse, WhatOverflowedBeforeItWasEditedByHandIsSkipped) {
  One run;
  run.backward(kInf);
  run.precision.unscale(run.optimizer);
  kernels::fill(run.model.w().grad(), 0.0);
  const optim::StepResult result = run.precision.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.culprit, "w");
  EXPECT_EQ(run.precision.loss_scale(), 512.0);
}

TEST(Misuse, ABackwardAfterUnscaleIsAddedToTheWhole) {
  One run;
  run.backward(0.5);
  run.precision.unscale(run.optimizer);
  kernels::fill(run.model.w().grad(), 0.125);
  EXPECT_TRUE(run.train(0.25).applied);
  EXPECT_EQ(run.model.value(), 1.0 - 0.375);
}

TEST(Misuse, GradientsOfOneOptimizerHaveEachTheirOwnScale) {
  Weight a, b;
  const NamedTensors both = {{"a", a.w()}, {"b", b.w()}};
  optim::FusedSGD optimizer(both, {.lr = 1.0});
  Amp precision = initialize({&a, &b}, {&optimizer}, with_losses(2));
  set_two_scales(precision);
  for (int part = 0; part < 2; ++part) {  // the second is added to the sums
    precision.backward(a.loss(0.25), {.loss_id = 0});
    precision.backward(b.loss(0.125), {.loss_id = 1});
    precision.unscale(optimizer);
    EXPECT_EQ(values(a.w().grad()), Values(4, 0.25 * (part + 1)));
    EXPECT_EQ(values(b.w().grad()), Values(4, 0.125 * (part + 1)));
  }
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(a.value(), 0.5);
  EXPECT_EQ(b.value(), 0.75);
}

TEST(Misuse, AdoptedGradientsHaveTheScaleOfTheirLoss) {
  TwoScales run;
  autograd::backward(run.model.loss(0.25 * run.precision.loss_scale(1)));
  run.precision.adopt_gradients(run.optimizer, {.loss_id = 1});
  EXPECT_TRUE(run.precision.step().applied);
  EXPECT_EQ(run.model.value(), 0.75);
}

TEST(Misuse, AParameterThatNoOptimizerStepsLosesNothing) {
  Pair pair;
  set_two_scales(pair.precision);
  Weight own;  // updated by hand
  const auto loss = [&](double coefficient) {
    return autograd::add(pair.a.loss(0.25), own.loss(coefficient));
  };
  pair.precision.backward(loss(0.5), {.loss_id = 0});
  pair.precision.backward(loss(0.5), {.loss_id = 1});
  EXPECT_EQ(values(pair.precision.unscaled_gradient(own.w())), Values(4, 1.0));
}

TEST(Misuse, AModelThatEndsBeforeItsStepGivesItsMemoryBack) {
  const auto bytes = [] { return test::bytes_of(core::MemoryCategory::gradients); };
  const std::size_t before = bytes();
  {
    TwoScales run;
    run.backward(0.25, {.loss_id = 0});
    run.backward(0.25, {.loss_id = 1});
    EXPECT_GT(bytes(), before);
  }
  EXPECT_EQ(bytes(), before);
}

TEST(Misuse, AStateOfAmpAloneEndsWhatIsPending) {
  One run;
  run.backward(0.25);
  run.precision.load_state_dict(run.precision.state_dict());
  EXPECT_FALSE(run.model.w().grad().defined());
  EXPECT_FALSE(run.precision.step().applied);
  EXPECT_EQ(run.model.value(), 1.0);
}

TEST(Misuse, OverflowsOfGradientsThatWereClearedAreForgotten) {
  One run(with_losses(2));
  run.backward(kNaN, {.loss_id = 0});
  run.backward(0.5, {.loss_id = 1});
  run.optimizer.clear_grad();  // a bad batch
  expect_applied(run.train(0.25, {.loss_id = 1}));
  EXPECT_EQ(run.model.value(), 0.75);
  EXPECT_EQ(run.precision.loss_scale(0), 1024.0);
}

TEST(Misuse, AnOptimizerThatHoldsNothingOfALossSkipsNothingForIt) {
  Pair pair;
  pair.precision.backward(pair.a.loss(kInf), {.loss_id = 0});  // for all optimizers
  EXPECT_FALSE(pair.step_a().applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
  pair.precision.backward(pair.b.loss(0.25), {.loss_id = 1});
  expect_applied(pair.step_b());
  EXPECT_EQ(pair.b.value(), 0.75);
}

/// What nobody steps and nobody clears is not a part of the loss's next backward.
TEST(Misuse, AnOverflowThatOnlyAParameterWithoutAnOptimizerHoldsIsOver) {
  Weight a, b;
  optim::FusedSGD optimizer(a.parameters(), {.lr = 1.0});
  Amp precision = initialize({&a, &b}, {&optimizer}, {.opt_level = OptLevel::O0, .num_losses = 2});
  const auto loss = [&](double x) { return autograd::add(a.loss(x), b.loss(x)); };
  precision.backward(loss(kInf), {.loss_id = 0});
  precision.backward(loss(0.25), {.loss_id = 1});
  EXPECT_FALSE(optimizer.step().applied);
  precision.backward(loss(0.25), {.loss_id = 0});
  expect_applied(precision.step());
  EXPECT_EQ(a.value(), 0.75);
}

/// Gradients of one loss that were given to other optimizers are judged by themselves.
TEST(Misuse, AnOptimizerStepsWhatItHoldsOfALossThatOverflowedForAnother) {
  Pair pair;
  pair.backward(0.25, 0.25);
  pair.backward_a(kInf);
  EXPECT_FALSE(pair.step_a().applied);
  expect_applied(pair.step_b());
  EXPECT_EQ(pair.b.value(), 0.75);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
}

/// This rank's own gradients are finite.
TEST(Misuse, AnOptimizerThatStepsLaterSkipsWhatOverflowedOnAnotherRank) {
  Options options = with_losses(2);
  bool overflows = true;
  options.world = {
      0, 2, [&](const std::string& own, std::string_view name) {
        if (name == "amp's options") return std::vector{own};
        const std::vector<core::NonFinite> found{{"w", 4, 0}};
        return std::vector{own, test::step_report(own, overflows ? found : decltype(found){})};
      }};
  Pair pair(options);
  pair.backward(0.25, 0.25);
  EXPECT_FALSE(pair.step_a().applied);
  overflows = false;
  EXPECT_FALSE(pair.step_b().applied);
  EXPECT_EQ(pair.b.value(), 1.0);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
}

TEST(Misuse, ABackwardAfterAStepIsJudgedAlthoughAnotherOptimizerHasNotStepped) {
  Pair pair;
  pair.backward(0.25, 0.25);
  EXPECT_TRUE(pair.step_a().applied);
  pair.precision.backward(pair.a.loss(kInf), {.loss_id = 0});
  EXPECT_FALSE(pair.step_a().applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
}

TEST(Misuse, AReportOfCapturableStepsTellsOfEachOverflowOnce) {
  One run;
  run.precision.set_capturable(true);
  for (const double coefficient : {kInf, 0.25}) {
    run.backward(coefficient);
    (void)run.precision.step();
    EXPECT_EQ(run.precision.report().applied, coefficient == 0.25);
  }
}

TEST(Misuse, AnyLossWithADelayedUnscaleIsRefusedByTheStep) {
  One run(with_losses(2));
  run.backward(0.25, {.loss_id = 0, .delay_unscale = true});
  EXPECT_THROW((void)run.precision.step(), core::InvalidArgument);
  run.backward(0.25, {.loss_id = 1});
  EXPECT_THROW((void)run.precision.step(), core::InvalidArgument);
  EXPECT_TRUE(run.train(0.25, {.loss_id = 0}).applied);
  EXPECT_EQ(run.model.value(), 0.25);
}

TEST(Misuse, AStepOfAllIsAppliedWhereAnOptimizerHasNoGradient) {
  Pair pair(kO2);
  optim::Schedule of_a(pair.a_optimizer, optim::linear(4)),
      of_b(pair.b_optimizer, optim::linear(4));
  const auto step = [&] {
    const optim::StepResult result = pair.precision.step();
    of_a.step(result);
    of_b.step(result);
    return result;
  };
  pair.precision.backward(pair.b.loss(0.25));
  const optim::StepResult result = step();
  EXPECT_TRUE(result.applied);
  EXPECT_EQ(result.reason, "");
  EXPECT_NEAR(result.gradient_norm, 0.5, 1e-9);
  EXPECT_FALSE(step().applied);  // none has one
  pair.backward_a(kInf, 0);
  EXPECT_FALSE(step().applied);
  for (const optim::Schedule* schedule : {&of_a, &of_b}) EXPECT_EQ(schedule->position(), 1);
  for (const optim::Optimizer* optimizer : {&pair.a_optimizer, &pair.b_optimizer})
    EXPECT_EQ(optimizer->groups()[0].lr, 0.75);
}

TEST(Misuse, AnotherOptimizerStepsTheWholeGradientThatItTakesOver) {
  Weight model;
  auto optimizer = test::maker<optim::FusedSGD>(optim::SgdOptions{})(model.parameters());
  for (const double coefficient : {0.25, 0.5}) {
    autograd::backward(model.loss(coefficient));
    (void)optimizer->stash();
  }
  optimizer.reset();
  optim::FusedSGD other(model.parameters(), {.lr = 1.0});
  EXPECT_TRUE(other.step().applied);
  EXPECT_EQ(model.value(), 0.25);
}

TEST(Misuse, GradientsThatAreThereAtInitializeAreRefused) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  autograd::backward(model.loss(0.25));
  EXPECT_THROW((void)initialize(model, optimizer, kO2), core::InvalidArgument);
  EXPECT_EQ(model.w().dtype(), DType::f32);
  optimizer.clear_grad();
  EXPECT_NO_THROW((void)initialize(model, optimizer, kO2));
}

}  // namespace
}  // namespace cairn::amp
