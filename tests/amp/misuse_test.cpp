// What a trainer may do between a backward and its step: errors that are caught, unchecked steps of
// rules that look at norms, groups and states that come in between.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <memory>

#include "cairn/core/error.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/sgd.h"
#include "support.h"

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
  EXPECT_THROW(precision.step({.error_if_nonfinite = true}), core::Error);
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

}  // namespace
}  // namespace cairn::amp
