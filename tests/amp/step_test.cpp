// What a step is whoever takes it (an optimizer, an Amp, a ScaledStep): one wait for what ranks
// reduce, steps skipped in vain, optimizers that were moved from.
#include <gmock/gmock.h>

#include <functional>
#include <limits>
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

using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kStepInf = std::numeric_limits<double>::infinity();

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
    if (!slot.holds_gradient() || slot.state() == core::GradientSlot::State::reduced) return;
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

// ---- Steps skipped in vain

struct Skipping {
  optim::StepResult step(double coefficient, const optim::StepOptions& options = {}) {
    autograd::backward(autograd::affine(model.loss(coefficient), scaled.scale(), 0.0));
    return scaled.step(options);
  }
  StepWeight model;
  optim::FusedSGD optimizer{model.parameters(), {.lr = 1.0}};
  ScaledStep scaled{optimizer, {.init_scale = 8, .growth_interval = 1000}};
};

TEST(Step, OfAScaledStepThatIsSkippedInVainEndsInACollapse) {
  Skipping run;
  testing::internal::CaptureStderr();
  for (int k = 0; k < 3; ++k) EXPECT_FALSE(run.step(kStepInf, {.collapse_after = 3}).applied);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "it looks for its scale: 8, 4, 2";
  EXPECT_EQ(run.scaled.scale(), 1.0);
  testing::internal::CaptureStderr();
  for (int k = 0; k < 2; ++k) EXPECT_FALSE(run.step(kStepInf, {.collapse_after = 3}).applied);
  EXPECT_TRUE(run.step(0.25, {.collapse_after = 3}).applied);  // in a row, that is
  for (int k = 0; k < 2; ++k) EXPECT_FALSE(run.step(kStepInf, {.collapse_after = 3}).applied);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("FusedSGD: step skipped: inf in the gradient of w (2 elements); loss "
                              "scale stays 1 (its minimum)\n"));
  EXPECT_THAT(said, HasSubstr("(its minimum) (2 skipped in a row)\n"));
  try {
    (void)run.step(kStepInf, {.collapse_after = 3});
    FAIL() << "the third was skipped like the others";
  } catch (const optim::GradientCollapse& error) {
    EXPECT_THAT(error.parameters(), ElementsAre("w"));
  }
  EXPECT_EQ(run.model.value(), 0.75);
  EXPECT_FALSE(run.model.w().grad().defined());
  EXPECT_FALSE(run.step(kStepInf, {.collapse_after = 3}).applied);  // the count begins anew
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
