// Several losses and optimizers: scales of their own, who skips, what is refused, how often the
// host waits.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "cairn/core/error.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/message_of.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// w [n], whose gradient is the coefficient of its loss: sum(coefficient * w).
class Weight : public nn::Module {
 public:
  explicit Weight(std::int64_t n = 4) : w_(add_parameter("w", Tensor::full({n}, 1.0))) {}
  std::string kind() const override { return "Weight"; }
  Tensor forward(const Tensor& x) override { return autograd::sum(autograd::mul(w_, x)); }
  const Tensor& w() const { return w_; }

 private:
  Tensor w_;
};

/// The gradient of the half sum is the scale itself: 65536 is inf in f16.
const Options kO2{.opt_level = OptLevel::O2, .scaler = {.init_scale = 1024}};

Tensor coefficients(double value, std::int64_t n = 4) {
  return Tensor::full({n}, value);
}

class Losses : public testing::TestWithParam<OptLevel> {};

TEST_P(Losses, GradientsOfDifferentScalesAddUpUnscaled) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer,
                             {.opt_level = GetParam(),
                              .dynamic_loss_scale = true,
                              .scaler = {.init_scale = 1024},
                              .num_losses = 2});
  StateDict scalers = precision.apex_state_dict();  // 1024 and 16
  scalers.make_dict("loss_scaler1").set("loss_scale", 16.0);
  precision.load_state_dict(scalers);
  EXPECT_EQ(precision.loss_scale(1), 16.0);
  // Loss 0, 1, 0, 1: each contribution counts once, at its own scale.
  for (const double value : {0.25, 0.125}) {
    precision.backward(model(coefficients(value)), {.loss_id = 0});
    precision.backward(model(coefficients(2 * value)), {.loss_id = 1});
  }
  EXPECT_TRUE(precision.step().applied);
  const Tensor truth = kernels::MasterWeight::exists(model.w())
                           ? kernels::MasterWeight::of(model.w())->tensor()
                           : model.w();
  EXPECT_EQ(values(truth), std::vector<double>(4, 1.0 - 3 * 0.375));
}

TEST_P(Losses, OnlyTheLossThatOverflowedIsScaledDown) {
  for (const int bad : {0, 1}) {
    Weight model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    Amp precision = initialize(model, optimizer,
                               {.opt_level = GetParam(),
                                .dynamic_loss_scale = true,
                                .scaler = {.init_scale = 1024},
                                .num_losses = 2});
    for (const int id : {0, 1}) {
      precision.backward(model(coefficients(id == bad ? kInf : 0.25)), {.loss_id = id});
    }
    const optim::StepResult result = precision.step();
    EXPECT_FALSE(result.applied);
    EXPECT_THAT(result.reason, HasSubstr(core::str("loss ", bad, ": ")));
    EXPECT_EQ(precision.loss_scale(bad), 512.0);
    EXPECT_EQ(precision.loss_scale(1 - bad), 1024.0);
    EXPECT_EQ(precision.overflows().back().loss_id, bad);
    precision.backward(model(coefficients(0.25)), {.loss_id = bad});
    EXPECT_TRUE(precision.step().applied);  // nothing of the skipped step is left
    const Tensor truth = kernels::MasterWeight::exists(model.w())
                             ? kernels::MasterWeight::of(model.w())->tensor()
                             : model.w();
    EXPECT_EQ(values(truth), std::vector<double>(4, 0.75));
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Losses, testing::ValuesIn(kLevels),
                         [](const auto& info) { return std::string(name(info.param)); });

struct Pair {
  Weight a, b;
  optim::FusedSGD a_optimizer{a.parameters(), {.lr = 1.0}};
  optim::FusedSGD b_optimizer{b.parameters(), {.lr = 1.0}};
  Amp precision =
      initialize({&a, &b}, {&a_optimizer, &b_optimizer},
                 {.opt_level = OptLevel::O2, .scaler = {.init_scale = 1024}, .num_losses = 3});
};

TEST(SeveralOptimizers, EachStepsForItselfAndWaitsOnce) {
  Pair pair;
  for (int step = 0; step < 3; ++step) {
    pair.precision.backward(pair.a(coefficients(0.125)),
                            {.loss_id = 0, .optimizers = {&pair.a_optimizer}});
    pair.precision.backward(pair.a(coefficients(0.125)),
                            {.loss_id = 1, .optimizers = {&pair.a_optimizer}});
    EXPECT_TRUE(pair.precision.step(pair.a_optimizer).applied);
    pair.precision.backward(pair.b(coefficients(0.25)),
                            {.loss_id = 2, .optimizers = {&pair.b_optimizer}});
    EXPECT_TRUE(pair.precision.step(pair.b_optimizer).applied);
  }
  EXPECT_EQ(values(kernels::MasterWeight::of(pair.a.w())->tensor()), std::vector<double>(4, 0.25));
  EXPECT_EQ(values(kernels::MasterWeight::of(pair.b.w())->tensor()), std::vector<double>(4, 0.25));
}

TEST(SeveralOptimizers, AnOverflowSkipsThoseThatItsLossReached) {
  Pair pair;
  const auto both = autograd::add(pair.a(coefficients(kInf)), pair.b(coefficients(0.25)));
  pair.precision.backward(both, {.loss_id = 0});  // reaches both
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);
  const optim::StepResult b = pair.precision.step(pair.b_optimizer);
  EXPECT_FALSE(b.applied);
  EXPECT_THAT(b.reason, HasSubstr("in the step of another optimizer"));
  EXPECT_EQ(pair.precision.loss_scale(0), 512.0);  // counted once

  pair.precision.backward(pair.a(coefficients(kInf)),
                          {.loss_id = 0, .optimizers = {&pair.a_optimizer}});
  pair.precision.backward(pair.b(coefficients(0.25)),
                          {.loss_id = 1, .optimizers = {&pair.b_optimizer}});
  EXPECT_FALSE(pair.precision.step(pair.a_optimizer).applied);
  EXPECT_TRUE(pair.precision.step(pair.b_optimizer).applied);
}

TEST(SeveralOptimizers, OneStepForAllTellsOfAll) {
  Pair pair;
  pair.precision.backward(pair.a(coefficients(kInf)),
                          {.loss_id = 0, .optimizers = {&pair.a_optimizer}});
  pair.precision.backward(pair.b(coefficients(0.25)),
                          {.loss_id = 1, .optimizers = {&pair.b_optimizer}});
  const optim::StepResult result = pair.precision.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(values(kernels::MasterWeight::of(pair.a.w())->tensor()), std::vector<double>(4, 1.0));
  EXPECT_EQ(values(kernels::MasterWeight::of(pair.b.w())->tensor()), std::vector<double>(4, 0.75));
}

TEST(SeveralOptimizers, AStrangerIsRefused) {
  Pair pair;
  Weight other;
  optim::FusedSGD stranger(other.parameters(), {});
  EXPECT_THROW((void)pair.precision.step(stranger), core::InvalidArgument);
  EXPECT_THROW(
      (void)pair.precision.scale_loss(pair.a(coefficients(1)), {.optimizers = {&stranger}}),
      core::InvalidArgument);
  EXPECT_THROW((void)pair.precision.scale_loss(pair.a(coefficients(1)), {.loss_id = 3}),
               core::InvalidArgument);
  EXPECT_THROW(pair.precision.loss_scale(-1), core::InvalidArgument);
}

TEST(Delays, AStepWaitsForABackwardWithoutDelayUnscale) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kO2);
  precision.backward(model(coefficients(0.25)), {.delay_unscale = true});
  EXPECT_THROW((void)precision.step(), core::InvalidArgument);
  precision.backward(model(coefficients(0.25)));
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(values(kernels::MasterWeight::of(model.w())->tensor()), std::vector<double>(4, 0.5));
}

TEST(Delays, ADelayedOverflowCountsLater) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kO2);
  precision.backward(model(coefficients(kInf)), {.delay_overflow_check = true});
  EXPECT_FALSE(precision.step().applied);
  EXPECT_EQ(precision.loss_scale(), 1024.0);
  precision.backward(model(coefficients(0.25)));
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(precision.loss_scale(), 512.0);
}

TEST(Delays, ADelayedOverflowCountsOnce) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kO2);
  precision.backward(model(coefficients(kInf)), {.delay_overflow_check = true});
  EXPECT_FALSE(precision.step().applied);
  for (int step = 0; step < 3; ++step) {
    precision.backward(model(coefficients(0.25)));
    EXPECT_TRUE(precision.step().applied);
    EXPECT_EQ(precision.loss_scale(), 512.0) << step;
  }
}

TEST(Delays, ADelayedOverflowEndsWithALoad) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kO2);
  const StateDict before = precision.state_dict();
  precision.backward(model(coefficients(kInf)), {.delay_overflow_check = true});
  EXPECT_FALSE(precision.step().applied);
  precision.load_state_dict(before);
  precision.backward(model(coefficients(0.25)));
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(precision.loss_scale(), 1024.0);
}

TEST(StaticScale, MayGoUnchecked) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2, .loss_scale = 8});
  precision.backward(model(coefficients(kInf)));
  EXPECT_TRUE(precision.step({.check = false}).applied);
  Weight dynamic;
  optim::FusedSGD dynamic_optimizer(dynamic.parameters(), {.lr = 1.0});
  Amp checks = initialize(dynamic, dynamic_optimizer, {.opt_level = OptLevel::O2});
  EXPECT_THROW((void)checks.step({.check = false}), core::InvalidArgument);
}

TEST(StaticScale, UncheckedOptimizersThatNeedNormsGetThem) {
  Weight model;
  optim::FusedLAMB optimizer(model.parameters(), {.lr = 1e-2});
  Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2, .loss_scale = 8});
  precision.backward(model(coefficients(0.25)));
  EXPECT_TRUE(precision.step({.check = false}).applied);
  EXPECT_NE(values(kernels::MasterWeight::of(model.w())->tensor()), std::vector<double>(4, 1.0));
}

TEST(LossWeight, MultipliesTheLoss) {
  Weight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  Amp precision = initialize(model, optimizer, kO2);
  precision.backward(model(coefficients(0.25)), {.weight = 0.5});
  precision.backward(model(coefficients(0.25)), {.weight = 1.5});
  EXPECT_TRUE(precision.step({.gradient_scale = 0.5}).applied);
  EXPECT_EQ(values(kernels::MasterWeight::of(model.w())->tensor()), std::vector<double>(4, 0.75));
  EXPECT_THROW((void)precision.scale_loss(model(coefficients(1)), {.weight = kInf}),
               core::InvalidArgument);
}

TEST(RetainGraph, LetsALossRunBackwardTwice) {
  for (const OptLevel level : kLevels) {
    Weight model;
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    Amp precision =
        initialize(model, optimizer, {.opt_level = level, .scaler = {.init_scale = 1024}});
    const Tensor loss = model(coefficients(0.25));
    precision.backward(loss, {.retain_graph = true});
    const ScaledLoss again = precision.scale_loss(loss, {.retain_graph = true});
    again.backward();
    precision.backward(loss);
    EXPECT_TRUE(precision.step().applied);
    EXPECT_EQ(values(model.w()), std::vector<double>(4, 0.25)) << name(level);
    EXPECT_THAT(test::message_of<core::Error>([&] { precision.backward(loss); }),
                HasSubstr("released"));
  }
}

}  // namespace
}  // namespace cairn::amp
