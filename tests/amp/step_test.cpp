// What a step is whoever takes it (an optimizer, an Amp, a ScaledStep): one wait for what ranks
// reduce, steps skipped in vain, optimizers that were moved from.
#include <gmock/gmock.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cairn/amp/scaled_step.h"
#include "cairn/core/device.h"
#include "cairn/core/memory.h"
#include "cairn/core/work_observer.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/schedule.h"
#include "support.h"
#include "support/fake_world.h"

namespace cairn::amp {
namespace {

using test::said_by;
using testing::ElementsAre;
using testing::HasSubstr;

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
  Weight model;
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

/// A trainer's own backwards, for a ScaledStep.
struct Scaled {
  explicit Scaled(const LossScalerOptions& options) : scaled(optimizer, options) {}
  optim::StepResult step(double coefficient, const optim::StepOptions& options = {}) {
    autograd::backward(autograd::affine(model.loss(coefficient), scaled.scale(), 0.0));
    return scaled.step(options);
  }
  Weight model;
  optim::FusedSGD optimizer{model.parameters(), {.lr = 0.125}};
  ScaledStep scaled;
};

/// Bytes that a step lacks, more of them allowed from try to try.
TEST(Step, OfAmpThatLacksMemoryWritesNothing) {
  nn::Sequential model = make_model(), plenty = make_model();
  const Device device = core::default_device();
  const auto train = [&](nn::Sequential& trained, const auto& step) {
    const NamedTensors all = trained.parameters();
    optim::FusedAdam first(NamedTensors(all.begin(), all.begin() + 2), {.lr = 1e-2});
    optim::FusedAdam second(NamedTensors(all.begin() + 2, all.end()), {.lr = 1e-2});
    Amp precision = initialize({&trained}, {&first, &second}, {.opt_level = OptLevel::O0});
    precision.backward(loss_of(trained, make_batch(1)));
    step(precision);
    return values(trained.parameters());
  };
  int refused = 0;
  const auto in_little = [&](Amp& precision) {
    const std::vector<Values> before = values(model.parameters());
    for (std::size_t room = 0;; room += 512) {
      core::set_memory_capacity(device, core::memory_stats(device).current_total + room);
      try {
        EXPECT_TRUE(precision.step().applied);
        break;
      } catch (const core::OutOfMemory&) {
        ++refused;
        EXPECT_EQ(values(model.parameters()), before) << room;
      }
    }
    core::set_memory_capacity(device, SIZE_MAX);
  };
  const std::vector<Values> expected =
      train(plenty, [](Amp& precision) { EXPECT_TRUE(precision.step().applied); });
  EXPECT_EQ(train(model, in_little), expected);
  EXPECT_GT(refused, 1);
}

/// Takes memory between the updates of two optimizers, in blocks like the arena of three weights.
struct TakesMemory final : core::WorkObserver {
  void ran(const core::ObservedWork& work) override {
    if (work.kind != core::ObservedWork::Kind::update) return;
    for (int k = 0; k < 8; ++k) taken.push_back(Tensor::full({48}, kNaN));
  }
  std::vector<Tensor> taken;
};

// The end of the first update lays their arena out anew: the second's gradients have moved.
TEST(Step, OfAmpUsesGradientsOfAnArenaThatItLaysOutAnew) {
  Weight a, b, c;
  const Tensor other = c.parameters()[0].tensor;
  const auto arena = optim::GradientArena::attach({{"a", a.w()}, {"b", b.w()}, {"c", other}});
  optim::FusedSGD first(NamedTensors{{"a", a.w()}, {"c", other}}, {.lr = 1.0});
  optim::FusedSGD second(b.parameters(), {.lr = 1.0});
  Amp precision = initialize({&a, &b, &c}, {&first, &second}, {.opt_level = OptLevel::O0});
  precision.backward(autograd::add(a.loss(0.25), b.loss(0.25)));
  Tensor(other).set_requires_grad(false);
  TakesMemory observer;
  {
    const core::WorkObservation observed(observer);
    expect_applied(precision.step());
  }
  EXPECT_EQ(observer.taken.size(), 16u);
  EXPECT_EQ(a.value(), 0.75);
  EXPECT_EQ(b.value(), 0.75);
}

TEST(Step, OfAScaledStepThatIsSkippedInVainEndsInACollapse) {
  Scaled run({.init_scale = 8, .growth_interval = 1000});
  const auto skip = [&](int times) {
    for (int k = 0; k < times; ++k) EXPECT_FALSE(run.step(kInf, {.collapse_after = 3}).applied);
  };
  EXPECT_EQ(said_by([&] { skip(3); }), "") << "it looks for its scale: 8, 4, 2";
  EXPECT_EQ(run.scaled.scale(), 1.0);
  const std::string said = said_by([&] {
    skip(2);
    EXPECT_TRUE(run.step(0.5, {.collapse_after = 3}).applied);  // in a row, that is
    skip(2);
  });
  EXPECT_THAT(said, HasSubstr("FusedSGD: step skipped: inf in the gradient of w (4 elements); loss "
                              "scale stays 1 (its minimum)\n"));
  EXPECT_THAT(said, HasSubstr("(its minimum) (2 skipped in a row)\n"));
  try {
    (void)run.step(kInf, {.collapse_after = 3});
    FAIL() << "the third was skipped like the others";
  } catch (const optim::GradientCollapse& error) {
    EXPECT_THAT(error.parameters(), ElementsAre("w"));
  }
  EXPECT_EQ(run.model.value(), 1.0 - 0.125 * 0.5);
  EXPECT_FALSE(run.model.w().grad().defined());
  skip(1);  // the count begins anew
}

TEST(Step, OfAScaledStepClearsWhatAutogradWrote) {
  Scaled run({.init_scale = 1024, .growth_interval = 100});
  for (const double coefficient : {0.5, kInf, 0.5, 0.5}) {
    EXPECT_EQ(run.step(coefficient).applied, coefficient == 0.5);
  }
  EXPECT_EQ(run.model.value(), 1.0 - 3 * 0.125 * 0.5);
  EXPECT_EQ(run.scaled.scale(), 512.0);
}

TEST(Step, OfAScaledStepWithoutAGradientMovesNothing) {
  Scaled run({.init_scale = 4, .growth_interval = 1});
  EXPECT_FALSE(run.scaled.step().applied);
  EXPECT_EQ(run.scaled.scale(), 4.0);
}

TEST(Step, OfAMovedOptimizerNamesTheMove) {
  Weight model;
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
    EXPECT_THAT(message_of(call), HasSubstr("one that was moved from (move it before")) << what;
  }
  EXPECT_EQ(scaled.scale(), 65536.0);
}

TEST(Step, OfAmpNamesAMovedOptimizerAndAMovedModel) {
  auto model = std::make_unique<nn::Sequential>(nn::Linear(2, 2));
  optim::FusedSGD optimizer(model->parameters(), {.lr = 1.0});
  Amp precision = initialize(*model, optimizer, kO2);
  const optim::FusedSGD elsewhere = std::move(optimizer);
  EXPECT_THAT(message_of([&] { (void)precision.step(); }), HasSubstr("moved"));
  EXPECT_THAT(message_of([&] { precision.backward(Tensor::full({1}, 1.0)); }), HasSubstr("moved"));
  nn::Sequential other = std::move(*model);
  EXPECT_THROW(precision.release(), core::InvalidArgument);
  amp::release(other);
  EXPECT_EQ(other.parameters().front().tensor.dtype(), DType::f32);
}

}  // namespace
}  // namespace cairn::amp
