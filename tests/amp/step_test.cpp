// What a step is whoever takes it (an optimizer, an Amp, a ScaledStep): one wait for what ranks
// reduce, optimizers that were moved from.
#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cairn/amp/scaled_step.h"
#include "cairn/core/error.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/schedule.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/fake_world.h"
#include "support/message_of.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

/// w [2], whose gradient is the coefficient of its loss.
class StepWeight : public nn::Module {
 public:
  StepWeight() : w_(add_parameter("w", Tensor::full({2}, 1.0))) {}
  std::string kind() const override { return "Weight"; }
  Tensor forward(const Tensor& x) override { return autograd::sum(autograd::mul(w_, x)); }
  Tensor loss(double coefficient) { return (*this)(Tensor::full({2}, coefficient)); }
  const Tensor& w() const { return w_; }
  double value() const { return values(kernels::master_value(w_)).front(); }

 private:
  Tensor w_;
};

/// Ranks whose mean is what this one has; until it is asked for, the gradient is another.
struct CountingReducer final : core::GradientReducer {
  explicit CountingReducer(const Tensor& parameter) : parameter(parameter) {}
  void reduce_pending() override {
    ++waits;
    core::GradientSlot& slot = parameter.gradient_slot();
    if (!slot.holds_gradient() || slot.holds_reduced()) return;
    kernels::affine(slot.memory(), 0.5, 0.0, slot.memory());
    slot.mark_reduced();
  }
  Tensor parameter;
  int waits = 0;
};

struct Reduced {
  Reduced() { model.w().gradient_slot().set_reducer(reducer); }
  StepWeight model;
  std::shared_ptr<CountingReducer> reducer = std::make_shared<CountingReducer>(model.w());
  optim::FusedSGD optimizer{model.parameters(), {.lr = 1.0}};
};

TEST(Step, OfAnOptimizerWaitsOnceAndUsesWhatWasReduced) {
  Reduced run;
  for (const bool check : {true, false}) {
    autograd::backward(run.model.loss(0.25));
    EXPECT_TRUE(run.optimizer.step({.check = check}).applied);
    EXPECT_EQ(std::exchange(run.reducer->waits, 0), 1);
  }
  EXPECT_EQ(run.model.value(), 1.0 - 2 * 0.125);
}

TEST(Step, InPartsWaitsInEach) {
  Reduced run;
  autograd::backward(run.model.loss(0.25));
  const optim::GradientReport report = run.optimizer.begin_check().read();
  EXPECT_EQ(std::exchange(run.reducer->waits, 0), 1);
  autograd::backward(run.model.loss(0.25));  // since then
  EXPECT_TRUE(run.optimizer.update(report, {}).applied);
  EXPECT_EQ(run.reducer->waits, 1);
  EXPECT_EQ(run.model.value(), 1.0 - (0.125 + 0.25) / 2);
}

TEST(Step, OfAmpWaitsOnceAndUsesWhatWasReduced) {
  for (const bool check : {true, false}) {
    Reduced run;
    Amp precision = initialize(
        run.model, run.optimizer,
        {.opt_level = OptLevel::O2, .loss_scale = 1024.0, .world = {0, 2, test::alike(2)}});
    precision.backward(run.model.loss(0.25));
    EXPECT_TRUE(precision.step({.check = check}).applied);
    EXPECT_EQ(run.reducer->waits, 1);
    EXPECT_EQ(run.model.value(), 1.0 - 0.125);
  }
}

TEST(Step, OfAScaledStepWaitsOnceAndUsesWhatWasReduced) {
  Reduced run;
  ScaledStep scaled(run.optimizer, {.init_scale = 1024}, {0, 2, test::alike(2)});
  autograd::backward(autograd::affine(run.model.loss(0.25), scaled.scale(), 0.0));
  EXPECT_TRUE(scaled.step().applied);
  EXPECT_EQ(run.reducer->waits, 1);
  EXPECT_EQ(run.model.value(), 1.0 - 0.125);
}

// ---- Optimizers that were moved from

TEST(Step, OfAMovedOptimizerNamesTheMove) {
  StepWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
  ScaledStep scaled(optimizer);
  optim::Schedule schedule(optimizer, optim::constant(0.5));
  const optim::LARC larc(optimizer);
  const optim::FusedSGD elsewhere = std::move(optimizer);
  const std::vector<std::pair<const char*, std::function<void()>>> calls = {
      {"step", [&] { (void)optimizer.step(); }},
      {"update", [&] { (void)optimizer.update({}, {}); }},
      {"begin_check", [&] { (void)optimizer.begin_check(); }},
      {"lr", [&] { (void)optimizer.lr(); }},
      {"ScaledStep", [&] { (void)scaled.step(); }},
      {"Schedule", [&] { schedule.step({}); }},
      {"a new Schedule", [&] { optim::Schedule(optimizer, optim::constant()); }},
      {"LARC", [&] { (void)larc.optimizer().step(); }},
      {"LARC's options", [&] { (void)larc.options(); }},
      {"a new LARC", [&] { const optim::LARC another(optimizer); }}};
  for (const auto& [what, call] : calls) {
    EXPECT_THAT(test::message_of(call), HasSubstr("one that was moved from (move it before"))
        << what;
  }
  EXPECT_EQ(scaled.scale(), 65536.0);
}

}  // namespace
}  // namespace cairn::amp
