// What a trainer may do between a backward and its step: errors that are caught, unchecked steps of
// rules that look at norms, groups and states that come in between.
#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "cairn/amp/scaled_step.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/fake_world.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

constexpr double kMisuseInf = std::numeric_limits<double>::infinity();

/// w [4] of ones, whose gradient is the coefficient of its loss: sum(coefficient * w).
class MisuseWeight : public nn::Module {
 public:
  MisuseWeight() : w_(add_parameter("w", Tensor::full({4}, 1.0))) {}
  std::string kind() const override { return "Weight"; }
  Tensor forward(const Tensor& x) override { return autograd::sum(autograd::mul(w_, x)); }
  Tensor loss(double coefficient) { return (*this)(Tensor::full({4}, coefficient)); }
  const Tensor& w() const { return w_; }
  double value() const { return values(kernels::master_value(w_)).front(); }

 private:
  Tensor w_;
};

const Options kMisuseO2{.opt_level = OptLevel::O2, .scaler = {.init_scale = 1024}};

struct MisusePair {
  explicit MisusePair(const Options& options)
      : precision(initialize({&a, &b}, {&a_optimizer, &b_optimizer}, options)) {}
  Tensor loss(double a_coefficient, double b_coefficient) {
    return autograd::add(a.loss(a_coefficient), b.loss(b_coefficient));
  }
  MisuseWeight a, b;
  optim::FusedSGD a_optimizer{a.parameters(), {.lr = 1.0}};
  optim::FusedSGD b_optimizer{b.parameters(), {.lr = 1.0}};
  Amp precision;
};

TEST(Misuse, AnErrorThatIsCaughtSkipsNoFurtherStep) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kMisuseO2);
  precision.backward(model.loss(kMisuseInf));
  EXPECT_THROW((void)precision.step({.error_if_nonfinite = true}), core::Error);
  EXPECT_EQ(precision.loss_scale(), 512.0);
  optimizer.clear_grad();
  precision.backward(model.loss(0.25));
  const optim::StepResult result = precision.step();
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_EQ(model.value(), 0.75);
}

TEST(Misuse, RulesThatLookAtNormsMayStepUnchecked) {
  for (const int rule : {0, 1, 2}) {
    SCOPED_TRACE(rule);
    MisuseWeight model;
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
    EXPECT_TRUE(precision.step({.check = false}).applied);
    EXPECT_LT(model.value(), 1.0);
  }
}

TEST(Misuse, TheNormOfAllOptimizersIsOfTheTypeAskedFor) {
  for (const auto& [type, expected] : {std::pair{1.0, 28.0}, {2.0, 10.0}, {kMisuseInf, 4.0}}) {
    MisusePair pair(kMisuseO2);
    pair.precision.backward(pair.loss(3.0, 4.0));
    EXPECT_NEAR(pair.precision.step({.norm_type = type}).gradient_norm, expected, 1e-12);
  }
}

TEST(Misuse, OneLossOfTwoOptimizersCountsOnce) {
  Options options = kMisuseO2;
  options.scaler.growth_interval = 4;
  MisusePair pair(options);
  const auto step_both = [&](double b_coefficient) {
    pair.precision.backward(pair.loss(0.125, b_coefficient));
    const bool a = pair.precision.step(pair.a_optimizer).applied;
    const optim::StepResult b = pair.precision.step(pair.b_optimizer);
    EXPECT_EQ(a, b.applied);
    return b.reason;
  };
  for (int step = 0; step < 4; ++step) EXPECT_EQ(step_both(0.125), "");
  EXPECT_EQ(pair.precision.loss_scale(), 2048.0);
  EXPECT_THAT(step_both(kMisuseInf), HasSubstr("inf in the gradient of w (4 elements)"));
  EXPECT_EQ(pair.precision.loss_scale(), 1024.0);
  EXPECT_EQ(step_both(0.125), "");
  EXPECT_EQ(pair.a.value(), 1.0 - 5 * 0.125);
  EXPECT_EQ(pair.b.value(), 1.0 - 5 * 0.125);
}

TEST(Misuse, GradientsClearedBetweenTwoLossesAreGone) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Options options = kMisuseO2;
  options.num_losses = 2;
  Amp precision = initialize(model, optimizer, options);
  precision.backward(model.loss(0.25), {.loss_id = 0});
  optimizer.clear_grad();
  precision.backward(model.loss(0.125), {.loss_id = 1});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(model.value(), 0.875);
  precision.backward(model.loss(0.25), {.loss_id = 0});
  precision.backward(model.loss(0.25), {.loss_id = 1});  // the first one's are stashed now
  optimizer.clear_grad();
  precision.backward(model.loss(0.125), {.loss_id = 0});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(model.value(), 0.75);
}

TEST(Misuse, AGroupMayComeBetweenBackwardAndStep) {
  MisuseWeight a, b;
  optim::FusedSGD optimizer(a.parameters(), {.lr = 1.0});
  Options options = kMisuseO2;
  options.num_losses = 2;
  Amp precision = initialize({&a, &b}, {&optimizer}, options);
  precision.backward(a.loss(0.25), {.loss_id = 0});
  precision.backward(autograd::add(a.loss(0.25), b.loss(0.25)), {.loss_id = 1});
  optimizer.add_group({.parameters = {{"b", b.w()}}, .lr = 1.0, .momentum = 0.5});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(a.value(), 0.5);
  EXPECT_EQ(b.value(), 0.75);
}

TEST(Misuse, AStateLoadedBetweenBackwardAndStepEndsTheBackward) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0, .momentum = 0.5});
  Amp precision = initialize(model, optimizer, kMisuseO2);
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
  nn::Sequential model = make_model(), other = make_model();
  optim::FusedAdam optimizer(model.parameters()), other_optimizer(other.parameters());
  Amp precision = initialize(model, optimizer, kMisuseO2);
  Amp other_precision = initialize(other, other_optimizer, kMisuseO2);
  const Tensor loss = loss_of(model, make_batch(1));
  loss_of(other, make_batch(1));  // the same running statistics
  precision.backward(loss);
  EXPECT_THROW(precision.backward(loss), core::Error);  // its graph is gone
  optimizer.clear_grad();
  for (const std::uint64_t step : {1, 2, 3}) {
    EXPECT_TRUE(train_step(model, precision, make_batch(step)).applied);
    EXPECT_TRUE(train_step(other, other_precision, make_batch(step)).applied);
  }
  EXPECT_EQ(everything(model, optimizer), everything(other, other_optimizer));
}

TEST(Misuse, AnAbandonedAccumulationStartsAnew) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kMisuseO2);
  optim::Accumulation accumulation({.steps = 2});
  EXPECT_THROW(
      {
        const optim::MicroBatch micro = accumulation.begin(4);
        precision.backward(model.loss(0.5), {.weight = micro.weight()});
        throw std::runtime_error("a broken batch");
      },
      std::runtime_error);
  EXPECT_THROW((void)accumulation.begin(4), core::InvalidArgument);
  accumulation.reset();
  optimizer.clear_grad();
  for (int k = 0; k < 2; ++k) {
    const optim::MicroBatch micro = accumulation.begin(4);
    precision.backward(model.loss(0.25), {.weight = micro.weight()});
  }
  EXPECT_TRUE(precision.step({.gradient_scale = accumulation.finish()}).applied);
  EXPECT_EQ(model.value(), 0.75);
}

TEST(Misuse, FrozenParametersRemaindersAndOptionsThatChangeMidway) {
  nn::Sequential model = make_model();
  const NamedTensors parameters = model.parameters();
  Tensor frozen = parameters.front().tensor;
  const Tensor last = parameters.back().tensor;
  frozen.set_requires_grad(false);
  optim::FusedAdam optimizer(parameters, {.lr = 1e-2});
  optimizer.set_state_options({.moments = DType::bf16, .masters = optim::MasterStorage::remainder});
  Amp precision =
      initialize(model, optimizer, {.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
  const std::vector<double> before = values(frozen);
  EXPECT_TRUE(train_step(model, precision, make_batch(1)).applied);
  EXPECT_EQ(values(frozen), before);
  EXPECT_EQ(test::kept_as(frozen), optim::MasterStorage::remainder);

  const std::vector<double> truth = values(kernels::master_value(last));
  optimizer.set_state_options({});
  EXPECT_EQ(values(kernels::master_value(last)), truth);
  EXPECT_TRUE(train_step(model, precision, make_batch(2)).applied);
  EXPECT_EQ(test::kept_as(last), optim::MasterStorage::f32);
  optimizer.set_state_options({.masters = optim::MasterStorage::remainder});
  frozen.set_requires_grad(true);
  EXPECT_TRUE(train_step(model, precision, make_batch(3)).applied);
  EXPECT_TRUE(train_step(model, precision, make_batch(4)).applied);
  EXPECT_EQ(test::kept_as(last), optim::MasterStorage::remainder);
  EXPECT_NE(values(frozen), before);
}

TEST(Misuse, CleanStepsOfAnotherLossDoNotStopAFallback) {
  nn::Sequential bad(nn::Linear(4, 4)), good(nn::Linear(4, 4));
  kernels::fill(bad.parameters().front().tensor, 3.0);
  optim::FusedSGD bad_optimizer(bad.parameters()), good_optimizer(good.parameters());
  Options options = kMisuseO2;
  options.num_losses = 2;
  options.fallback_after = 3;
  Amp precision = initialize({&bad, &good}, {&bad_optimizer, &good_optimizer}, options);
  const Tensor large = Tensor::full({2, 4}, 6e4), small = Tensor::full({2, 4}, 0.1);
  for (int step = 0; step < 4; ++step) {
    precision.backward(autograd::mean(bad(large)), {.loss_id = 0, .optimizers = {&bad_optimizer}});
    EXPECT_FALSE(precision.step(bad_optimizer).applied);
    precision.backward(autograd::mean(good(small)),
                       {.loss_id = 1, .optimizers = {&good_optimizer}});
    EXPECT_TRUE(precision.step(good_optimizer).applied);
  }
  EXPECT_EQ(precision.fp32_layers(), std::vector<std::string>{"0/0"});
  precision.backward(autograd::mean(bad(large)), {.loss_id = 0, .optimizers = {&bad_optimizer}});
  EXPECT_TRUE(precision.step(bad_optimizer).applied);
}

// ---- Losses with scales of their own

/// Loss 0 at 1024, loss 1 at 16.
void set_two_scales(Amp& precision) {
  StateDict scalers = precision.apex_state_dict();
  scalers.make_dict("loss_scaler1").set("loss_scale", 16.0);
  precision.load_state_dict(scalers);
}

Options two_losses(Options options = kMisuseO2) {
  options.num_losses = 2;
  return options;
}

TEST(Misuse, LossesMayBeScaledBeforeAnyOfThemGoesBackward) {
  for (const int bad : {0, 1}) {
    MisuseWeight model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    Amp precision = initialize(model, optimizer, two_losses());
    set_two_scales(precision);
    for (int step = 0; step < 3; ++step) {
      const bool overflows = step == 1;
      const auto coefficient = [&](int id) { return overflows && id == bad ? kMisuseInf : 0.125; };
      const ScaledLoss first = precision.scale_loss(model.loss(coefficient(0)), {.loss_id = 0});
      const ScaledLoss second = precision.scale_loss(model.loss(coefficient(1)), {.loss_id = 1});
      first.backward();
      second.backward();
      EXPECT_EQ(precision.step().applied, !overflows);
    }
    EXPECT_EQ(precision.loss_scale(0), bad == 0 ? 512.0 : 1024.0);
    EXPECT_EQ(precision.loss_scale(1), bad == 1 ? 8.0 : 16.0);
    EXPECT_EQ(model.value(), 0.5);
  }
}

TEST(Misuse, AGradientInTwoPartsIsNotHandedOut) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, two_losses());
  set_two_scales(precision);
  precision.backward(model.loss(0.5), {.loss_id = 0});
  precision.backward(model.loss(0.25), {.loss_id = 1});
  try {
    (void)model.w().grad();
    FAIL() << "a part of the gradient";
  } catch (const core::InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("'w'"), HasSubstr("unscale")));
  }
  EXPECT_EQ(values(precision.unscaled_gradient(model.w())), std::vector<double>(4, 0.75));
}

TEST(Misuse, UnscaledGradientsMayBeClippedByHand) {
  for (const bool several : {false, true}) {
    MisuseWeight model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    Amp precision = initialize(model, optimizer, two_losses());
    set_two_scales(precision);
    precision.backward(model.loss(0.5), {.loss_id = 0});
    if (several) precision.backward(model.loss(0.25), {.loss_id = 1});
    precision.unscale(optimizer);
    const Tensor gradient = model.w().grad();
    EXPECT_EQ(gradient.dtype(), DType::f32);
    EXPECT_EQ(values(gradient), std::vector<double>(4, several ? 0.75 : 0.5));
    kernels::fill(gradient, 0.25);
    EXPECT_TRUE(precision.step().applied);
    EXPECT_EQ(model.value(), 0.75);
    EXPECT_FALSE(model.w().grad().defined());
  }
}

TEST(Misuse, WhatOverflowedBeforeItWasEditedByHandIsSkipped) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kMisuseO2);
  precision.backward(model.loss(kMisuseInf));
  precision.unscale(optimizer);
  kernels::fill(model.w().grad(), 0.0);
  const optim::StepResult result = precision.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.culprit, "w");
  EXPECT_EQ(precision.loss_scale(), 512.0);
}

TEST(Misuse, ABackwardAfterUnscaleIsAddedToTheWhole) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kMisuseO2);
  precision.backward(model.loss(0.5));
  precision.unscale(optimizer);
  kernels::fill(model.w().grad(), 0.125);
  precision.backward(model.loss(0.25));
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(model.value(), 1.0 - 0.375);
}

TEST(Misuse, GradientsOfOneOptimizerHaveEachTheirOwnScale) {
  MisuseWeight a, b;
  const NamedTensors both = {{"a", a.w()}, {"b", b.w()}};
  optim::FusedSGD optimizer(both, {.lr = 1.0});
  Amp precision = initialize({&a, &b}, {&optimizer}, two_losses());
  set_two_scales(precision);
  for (int part = 0; part < 2; ++part) {  // the second is added to the sums
    precision.backward(a.loss(0.25), {.loss_id = 0});
    precision.backward(b.loss(0.125), {.loss_id = 1});
    precision.unscale(optimizer);
    EXPECT_EQ(values(a.w().grad()), std::vector<double>(4, 0.25 * (part + 1)));
    EXPECT_EQ(values(b.w().grad()), std::vector<double>(4, 0.125 * (part + 1)));
  }
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(a.value(), 0.5);
  EXPECT_EQ(b.value(), 0.75);
}

TEST(Misuse, AdoptedGradientsHaveTheScaleOfTheirLoss) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, two_losses());
  set_two_scales(precision);  // 1024 and 16
  autograd::backward(model.loss(0.25 * precision.loss_scale(1)));
  precision.adopt_gradients(optimizer, {.loss_id = 1});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(model.value(), 0.75);
}

TEST(Misuse, AParameterThatNoOptimizerStepsLosesNothing) {
  MisusePair pair(two_losses());
  set_two_scales(pair.precision);
  MisuseWeight own;  // updated by hand
  const auto loss = [&](double coefficient) {
    return autograd::add(pair.a.loss(0.25), own.loss(coefficient));
  };
  pair.precision.backward(loss(0.5), {.loss_id = 0});
  pair.precision.backward(loss(0.5), {.loss_id = 1});
  EXPECT_EQ(values(pair.precision.unscaled_gradient(own.w())), std::vector<double>(4, 1.0));
}

TEST(Misuse, AModelThatEndsBeforeItsStepGivesItsMemoryBack) {
  const auto bytes = [] {
    return core::memory_stats(core::default_device()).of(core::MemoryCategory::gradients);
  };
  const auto two_backwards = [] {
    MisuseWeight model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    Amp precision = initialize(model, optimizer, two_losses());
    set_two_scales(precision);
    precision.backward(model.loss(0.25), {.loss_id = 0});
    precision.backward(model.loss(0.25), {.loss_id = 1});
  };
  const std::size_t before = bytes();
  two_backwards();
  EXPECT_EQ(bytes(), before);
}

TEST(Misuse, AStateOfAmpAloneEndsWhatIsPending) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kMisuseO2);
  precision.backward(model.loss(0.25));
  precision.load_state_dict(precision.state_dict());
  EXPECT_FALSE(model.w().grad().defined());
  EXPECT_FALSE(precision.step().applied);
  EXPECT_EQ(model.value(), 1.0);
}

TEST(Misuse, OverflowsOfGradientsThatWereClearedAreForgotten) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, two_losses());
  precision.backward(model.loss(std::nan("")), {.loss_id = 0});
  precision.backward(model.loss(0.5), {.loss_id = 1});
  optimizer.clear_grad();  // a bad batch
  precision.backward(model.loss(0.25), {.loss_id = 1});
  const optim::StepResult result = precision.step();
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_EQ(model.value(), 0.75);
  EXPECT_EQ(precision.loss_scale(0), 1024.0);
}

TEST(Misuse, AnOptimizerThatHoldsNothingOfALossSkipsNothingForIt) {
  MisusePair pair(two_losses());
  pair.precision.backward(pair.a.loss(kMisuseInf), {.loss_id = 0});  // for all optimizers
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
  pair.precision.backward(pair.b.loss(0.25), {.loss_id = 1});
  const optim::StepResult result = pair.precision.step(pair.b_optimizer);
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_EQ(pair.b.value(), 0.75);
}

TEST(Misuse, AnOptimizerThatStepsLaterSkipsWhatItHoldsOfAnOverflow) {
  MisusePair pair(two_losses());
  pair.precision.backward(pair.loss(kMisuseInf, 0.25), {.loss_id = 0});
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  EXPECT_FALSE(pair.precision.step(pair.b_optimizer).applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);  // once
  pair.precision.backward(pair.loss(0.25, 0.25), {.loss_id = 0});
  EXPECT_TRUE(pair.precision.step(pair.a_optimizer).applied);
  EXPECT_TRUE(pair.precision.step(pair.b_optimizer).applied);
}

/// What nobody steps and nobody clears is not a part of the loss's next backward.
TEST(Misuse, AnOverflowThatOnlyAParameterWithoutAnOptimizerHoldsIsOver) {
  MisuseWeight a, b;
  optim::FusedSGD optimizer(a.parameters(), {.lr = 1.0});
  Options options{.opt_level = OptLevel::O0};
  options.num_losses = 2;
  Amp precision = initialize({&a, &b}, {&optimizer}, options);
  const auto loss = [&](double x) { return autograd::add(a.loss(x), b.loss(x)); };
  precision.backward(loss(kMisuseInf), {.loss_id = 0});
  precision.backward(loss(0.25), {.loss_id = 1});
  EXPECT_FALSE(optimizer.step().applied);
  precision.backward(loss(0.25), {.loss_id = 0});
  const optim::StepResult result = precision.step();
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_EQ(a.value(), 0.75);
}

/// Gradients of one loss that were given to other optimizers are judged by themselves.
TEST(Misuse, AnOptimizerStepsWhatItHoldsOfALossThatOverflowedForAnother) {
  MisusePair pair(two_losses());
  pair.precision.backward(pair.loss(0.25, 0.25), {.loss_id = 0});
  pair.precision.backward(pair.a.loss(kMisuseInf),
                          {.loss_id = 0, .optimizers = {&pair.a_optimizer}});
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  const optim::StepResult result = pair.precision.step(pair.b_optimizer);
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_EQ(pair.b.value(), 0.75);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
}

/// This rank's own gradients are finite.
TEST(Misuse, AnOptimizerThatStepsLaterSkipsWhatOverflowedOnAnotherRank) {
  Options options = two_losses();
  bool overflows = true;
  options.world = {
      0, 2, [&](const std::string& own, std::string_view name) {
        if (name == "amp's options") return std::vector{own};
        const std::vector<core::NonFinite> found{{"w", 4, 0}};
        return std::vector{own, test::step_report(own, overflows ? found : decltype(found){})};
      }};
  MisusePair pair(options);
  pair.precision.backward(pair.loss(0.25, 0.25), {.loss_id = 0});
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  overflows = false;
  EXPECT_FALSE(pair.precision.step(pair.b_optimizer).applied);
  EXPECT_EQ(pair.b.value(), 1.0);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
}

TEST(Misuse, ABackwardAfterAStepIsJudgedAlthoughAnotherOptimizerHasNotStepped) {
  MisusePair pair(two_losses());
  pair.precision.backward(pair.loss(0.25, 0.25), {.loss_id = 0});
  EXPECT_TRUE(pair.precision.step(pair.a_optimizer).applied);
  pair.precision.backward(pair.a.loss(kMisuseInf), {.loss_id = 0});
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
}

TEST(Misuse, AReportOfCapturableStepsTellsOfEachOverflowOnce) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kMisuseO2);
  precision.set_capturable(true);
  for (const double coefficient : {kMisuseInf, 0.25}) {
    precision.backward(model.loss(coefficient));
    (void)precision.step();
    EXPECT_EQ(precision.report().applied, coefficient == 0.25);
  }
}

TEST(Misuse, AnyLossWithADelayedUnscaleIsRefusedByTheStep) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, two_losses());
  precision.backward(model.loss(0.25), {.loss_id = 0, .delay_unscale = true});
  precision.backward(model.loss(0.25), {.loss_id = 1});
  EXPECT_THROW((void)precision.step(), core::InvalidArgument);
  precision.backward(model.loss(0.25), {.loss_id = 0});
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(model.value(), 0.25);
}

TEST(Misuse, AStepOfAllIsAppliedWhereAnOptimizerHasNoGradient) {
  MisusePair pair(kMisuseO2);
  pair.precision.backward(pair.b.loss(0.25));
  const optim::StepResult result = pair.precision.step();
  EXPECT_TRUE(result.applied) << result.reason;
  EXPECT_EQ(result.reason, "");
  EXPECT_NEAR(result.gradient_norm, 0.5, 1e-9);
  EXPECT_FALSE(pair.precision.step().applied);  // none has one
}

TEST(Misuse, AnotherOptimizerStepsTheWholeGradientThatItTakesOver) {
  MisuseWeight model;
  auto optimizer =
      std::make_unique<optim::FusedSGD>(model.parameters(), optim::SgdOptions{.lr = 1.0});
  for (const double coefficient : {0.25, 0.5}) {
    autograd::backward(model.loss(coefficient));
    (void)optimizer->stash();
  }
  optimizer.reset();
  optim::FusedSGD other(model.parameters(), {.lr = 1.0});
  EXPECT_TRUE(other.step().applied);
  EXPECT_EQ(model.value(), 0.25);
}

TEST(Misuse, WhatWasMovedIsNamed) {
  auto model = std::make_unique<nn::Sequential>(nn::Linear(2, 2));
  optim::FusedSGD optimizer(model->parameters(), {.lr = 1.0});
  Amp precision = initialize(*model, optimizer, kMisuseO2);
  const optim::FusedSGD elsewhere = std::move(optimizer);
  for (const std::function<void()>& call :
       {std::function<void()>([&] { (void)precision.step(); }),
        std::function<void()>([&] { precision.backward(Tensor::full({1}, 1.0)); })}) {
    try {
      call();
      FAIL() << "a moved optimizer";
    } catch (const core::InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("moved"));
    }
  }
  nn::Sequential other = std::move(*model);
  EXPECT_THROW(precision.release(), core::InvalidArgument);
  amp::release(other);
  EXPECT_EQ(other.parameters().front().tensor.dtype(), DType::f32);
}

TEST(Misuse, GradientsThatAreThereAtInitializeAreRefused) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  autograd::backward(model.loss(0.25));
  EXPECT_THROW(initialize(model, optimizer, kMisuseO2), core::InvalidArgument);
  EXPECT_EQ(model.w().dtype(), DType::f32);
  optimizer.clear_grad();
  EXPECT_NO_THROW(initialize(model, optimizer, kMisuseO2));
}

TEST(Misuse, ScaledStepClearsWhatAutogradWrote) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.125});
  ScaledStep scaled(optimizer, {.init_scale = 1024, .growth_interval = 100});
  const auto backward = [&](double coefficient) {
    autograd::backward(autograd::affine(model.loss(coefficient), scaled.scale(), 0.0));
  };
  double expected = 1.0;
  for (int step = 0; step < 4; ++step) {
    const bool overflows = step == 1;
    backward(overflows ? kMisuseInf : 0.5);
    EXPECT_EQ(scaled.step().applied, !overflows);
    if (!overflows) expected -= 0.125 * 0.5;
  }
  EXPECT_EQ(model.value(), expected);
  EXPECT_EQ(scaled.scale(), 512.0);
}

TEST(Misuse, ScaledStepWithoutAGradientMovesNothing) {
  MisuseWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  ScaledStep scaled(optimizer, {.init_scale = 4, .growth_interval = 1});
  EXPECT_FALSE(scaled.step().applied);
  EXPECT_EQ(scaled.scale(), 4.0);
}

}  // namespace
}  // namespace cairn::amp
