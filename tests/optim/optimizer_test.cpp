#include "cairn/optim/optimizer.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "reference.h"
#include "support.h"

namespace cairn::optim {
namespace {

using test::everything;
using test::less;
using test::said_by;
using testing::HasSubstr;

NamedTensors two(DType dtype = DType::f32) {
  return {make_parameter("a.weight", {3, 5}, 1, dtype), make_parameter("a.bias", {7}, 2, dtype)};
}

TEST(Optimizer, AttachesAnArenaAndClearsAfterAStep) {
  const NamedTensors parameters = two();
  FusedAdam optimizer(parameters);
  const auto arena = GradientArena::of(parameters[0].tensor);
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(GradientArena::of(parameters[1].tensor), arena);
  write_gradients(parameters, 1);
  const StepResult result = optimizer.step();
  EXPECT_TRUE(result.applied);
  EXPECT_TRUE(result.reason.empty());
  EXPECT_EQ(optimizer.steps(), 1);
  EXPECT_FALSE(parameters[0].tensor.grad().defined());
  write_gradients(parameters, 2);
  expect_applied(optimizer.step({.keep_gradients = true}));
  EXPECT_TRUE(parameters[0].tensor.grad().defined());
}

// The next backward lays out what the step has no memory for.
TEST(Optimizer, AStepThatCannotLayGradientsOutAnewIsApplied) {
  const auto make = [] {
    return NamedTensors{make_parameter("a.weight", {64, 64}, 1), make_parameter("a.bias", {7}, 2)};
  };
  const NamedTensors parameters = make(), others = make();
  FusedSGD optimizer(parameters, {.lr = 0.5}), unbounded(others, {.lr = 0.5});
  const auto expect_the_same = [&] {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_EQ(exact(parameters[i].tensor), exact(others[i].tensor));
  };
  write_gradients(parameters, 1);
  write_gradients(others, 1);
  Tensor(parameters[1].tensor).set_requires_grad(false);
  Tensor(others[1].tensor).set_requires_grad(false);
  const auto arena = GradientArena::of(parameters[0].tensor);
  const Tensor kept = parameters[0].tensor.grad();  // and the memory of all with it
  const Device device = core::default_device();
  constexpr std::size_t kForTheUpdate = 8192;  // less than the gradients take
  core::set_memory_capacity(device, core::memory_stats(device).current_total + kForTheUpdate);
  expect_applied(optimizer.step());
  core::set_memory_capacity(device, SIZE_MAX);
  expect_applied(unbounded.step());
  expect_the_same();
  EXPECT_TRUE(arena->stale());
  arena->begin(1);
  EXPECT_FALSE(arena->stale());
  train(optimizer, {parameters[0]}, 2);
  train(unbounded, {others[0]}, 2);
  expect_the_same();
}

TEST(Optimizer, BumpsTheVersionOfWrittenWeights) {
  const NamedTensors parameters = two();
  FusedAdam optimizer(parameters);
  write_gradient(parameters[0].tensor, Values(15, 1.0));
  const auto written = parameters[0].tensor.storage()->version();
  const auto untouched = parameters[1].tensor.storage()->version();
  expect_applied(optimizer.step());
  EXPECT_GT(parameters[0].tensor.storage()->version(), written);
  EXPECT_EQ(parameters[1].tensor.storage()->version(), untouched);
}

class NonFinite : public testing::TestWithParam<DType> {};

TEST_P(NonFinite, SkipsNamesAndTouchesNothing) {
  const NamedTensors parameters = two(GetParam());
  FusedAdam optimizer(parameters, {.weight_decay = 0.1});
  train(optimizer, parameters, 1);
  const auto before = everything(parameters, optimizer);

  Values bias(7, 0.5);
  bias[2] = kInf, bias[4] = -kInf, bias[6] = kInf;
  write_gradient(parameters[0].tensor, Values(15, 1.0));
  write_gradient(parameters[1].tensor, bias);
  StepResult result = optimizer.step({.max_gradient_norm = 1.0});
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.culprit, "a.bias");
  EXPECT_EQ(result.reason, "inf in the gradient of a.bias (3 elements)");
  EXPECT_TRUE(std::isnan(result.gradient_norm));
  EXPECT_EQ(optimizer.steps(), 1);
  EXPECT_EQ(everything(parameters, optimizer), before);
  EXPECT_FALSE(parameters[0].tensor.grad().defined());

  Values weight(15, 1.0);
  weight[14] = kNaN;
  write_gradient(parameters[0].tensor, weight);
  write_gradient(parameters[1].tensor, bias);
  result = optimizer.step();
  EXPECT_EQ(result.reason, "NaN in the gradient of a.weight (1 element)");
  EXPECT_EQ(everything(parameters, optimizer), before);
}
INSTANTIATE_TEST_SUITE_P(DTypes, NonFinite, testing::Values(DType::f32, DType::f16, DType::bf16));

TEST(Optimizer, UncheckedStepsApplyWhatComes) {
  const NamedTensors parameters = two();
  FusedSGD optimizer(parameters, {.lr = 1.0});
  write_gradient(parameters[1].tensor, Values(7, kNaN));
  const StepResult result = optimizer.step({.check = false});
  EXPECT_TRUE(result.applied);
  EXPECT_TRUE(std::isnan(result.gradient_norm));
  EXPECT_TRUE(std::isnan(values(parameters[1].tensor)[0]));
}

template <class Reference>
void expect_own_count(const decltype(Reference::options)& options) {
  const NamedTensors parameters = two();
  typename Reference::Optimizer optimizer(parameters, options);
  Reference late{options};
  Values expected = values(parameters[1].tensor);
  for (int step = 0; step < 6; ++step) {
    write_gradient(parameters[0].tensor, Values(15, 1.0));
    if (step >= 3) {
      write_gradient(parameters[1].tensor, Values(7, 0.5));
      late.update(expected, Values(7, 0.5));
    }
    expect_applied(optimizer.step());
  }
  test::expect_close(parameters[1].tensor, expected, 4e-6, 2e-6);
}

TEST(Optimizer, AParameterThatJoinsLateStartsItsOwnCount) {
  expect_own_count<reference::Adam>({.lr = 0.1});
  expect_own_count<reference::Sgd>({.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
}

TEST(Optimizer, GroupsHaveTheirOwnRatesAndMomentum) {
  const NamedTensors parameters = two();
  FusedSGD optimizer({{{parameters[0]}, 0.5, 0.0}}, {});
  optimizer.add_group({{parameters[1]}, 0.2, 0.1});
  optimizer.groups()[1].momentum = 0.9;
  reference::Sgd references[] = {{{.lr = 0.5}},
                                 {{.lr = 0.2, .momentum = 0.9, .weight_decay = 0.1}}};
  std::vector<Values> expected = values(parameters);
  for (std::uint64_t step = 0; step < 4; ++step) {
    write_gradients(parameters, 5 * step);
    for (const std::size_t i : {0, 1}) {
      references[i].update(expected[i], values(parameters[i].tensor.grad()));
    }
    expect_applied(optimizer.step());
  }
  expect_weights(parameters, expected, 4e-6, 2e-6);
  optimizer.set_lr(0.0);
  EXPECT_EQ(optimizer.groups()[1].lr, 0.0);
  ParameterGroup wrong{{make_parameter("c", {2}, 1)}, 0.1, 0.0};
  wrong.beta1 = 1.0;
  EXPECT_THROW(optimizer.add_group(wrong), core::InvalidArgument);
}

TEST(Optimizer, TwoOptimizersShareAnArenaMadeBefore) {
  const NamedTensors parameters = two();
  const auto arena = GradientArena::attach(parameters);
  FusedSGD first({parameters[0]}, {.lr = 1.0}), second({parameters[1]}, {.lr = 1.0});
  for (const auto& [name, tensor] : parameters) EXPECT_EQ(GradientArena::of(tensor), arena);
  write_gradients(parameters, 5);
  expect_applied(first.step());
  EXPECT_FALSE(parameters[0].tensor.grad().defined());
  EXPECT_TRUE(parameters[1].tensor.grad().defined());
  expect_applied(second.step());
  EXPECT_FALSE(parameters[1].tensor.grad().defined());
}

TEST(Optimizer, TakesParametersOfAnArenaAndOthers) {
  NamedTensors parameters = two();
  const auto arena = GradientArena::attach({parameters[0]});
  FusedSGD optimizer(parameters, {.lr = 1.0});
  EXPECT_EQ(GradientArena::of(parameters[0].tensor), arena);
  EXPECT_NE(GradientArena::of(parameters[1].tensor), arena);
  EXPECT_NE(GradientArena::of(parameters[1].tensor), nullptr);
}

TEST(Optimizer, FollowsACastByItself) {
  const NamedTensors parameters = two();
  FusedAdam optimizer(parameters, {.lr = 0.1});
  train(optimizer, parameters, 1);
  for (NamedTensor parameter : parameters) {
    parameter.tensor.set_data(Tensor::zeros(parameter.tensor.shape(), DType::f16));
  }
  EXPECT_FALSE(parameters[0].tensor.gradient_slot().placed());
  write_gradients(parameters, 2);  // into tensors of their own
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_TRUE(parameters[0].tensor.gradient_slot().placed());
  EXPECT_EQ(parameters[0].tensor.gradient_slot().memory().dtype(), DType::f16);
  EXPECT_EQ(kernels::MasterWeight::of(parameters[0].tensor)->tensor().dtype(), DType::f32);
}

TEST(Optimizer, ForeignTensorsTakeTheSamePasses) {
  std::vector<float> weight{1, 2, 3}, gradient{4, 5, 6};
  const NamedTensor parameter = wrap_parameter("w", TensorView(weight.data(), {3}, DType::f32),
                                               TensorView(gradient.data(), {3}, DType::f32));
  FusedSGD optimizer({parameter}, {.lr = 0.5});
  EXPECT_EQ(GradientArena::of(parameter.tensor), nullptr);
  expect_applied(optimizer.step({.keep_gradients = true}));
  EXPECT_EQ(weight, (std::vector<float>{-1, -0.5, 0}));
  gradient = {2, 2, static_cast<float>(kInf)};
  EXPECT_EQ(optimizer.step({.keep_gradients = true}).culprit, "w");
  gradient = {2, 2, 2};
  expect_applied(optimizer.step());
  EXPECT_EQ(weight, (std::vector<float>{-2, -1.5, -1}));
  EXPECT_FALSE(optimizer.step().applied);  // cleared: nothing to do
  EXPECT_EQ(weight, (std::vector<float>{-2, -1.5, -1}));
}

class Collapse : public ::testing::Test {
 protected:
  StepResult skip(bool bias_too = true, const StepOptions& options = {}) {
    write_gradients(parameters_, 1);
    write_gradient(parameters_[0].tensor, Values(15, kNaN));
    if (bias_too) write_gradient(parameters_[1].tensor, Values(7, kInf));
    return optimizer_.step(options);
  }

  NamedTensors parameters_ = two();
  FusedSGD optimizer_{parameters_, {.lr = 0.1}};
};

TEST_F(Collapse, EndsARunInWhichNoStepIsApplied) {
  const Values before = values(parameters_[0].tensor);
  const std::string said = said_by([&] {
    for (int i = 0; i < 49; ++i) EXPECT_FALSE(skip(i % 2 == 0).applied);
  });
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 6);  // 1, 2, 4, 8, 16, 32
  EXPECT_THAT(said,
              HasSubstr("FusedSGD: step skipped: NaN in the gradient of a.weight (15 elements)"));
  EXPECT_THAT(said, HasSubstr("(32 skipped in a row)"));
  try {
    EXPECT_FALSE(skip().applied);
    FAIL() << "the 50th was skipped like the others";
  } catch (const GradientCollapse& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected a finite step, got 50 skipped in a row. The "
                                        "gradients of a.weight were not finite each time. (Look"));
    EXPECT_EQ(error.parameters(), std::vector<std::string>{"a.weight"});
  }
  EXPECT_EQ(values(parameters_[0].tensor), before);
  EXPECT_FALSE(parameters_[0].tensor.grad().defined());
  EXPECT_FALSE(skip().applied);  // the count begins anew
}

TEST_F(Collapse, TakesSkipsInARow) {
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 49; ++k) EXPECT_FALSE(skip().applied);
    train(optimizer_, parameters_, 1);
  }
  for (int k = 0; k < 49; ++k) EXPECT_FALSE(skip().applied);
  optimizer_.load_state_dict(optimizer_.state_dict());
  EXPECT_FALSE(skip().applied);
}

TEST_F(Collapse, ComesAsOftenAsTheOptionsSay) {
  for (int k = 0; k < 2; ++k) EXPECT_FALSE(skip(true, {.collapse_after = 3}).applied);
  EXPECT_THROW(skip(true, {.collapse_after = 3}), GradientCollapse);
  for (int k = 0; k < 200; ++k) EXPECT_FALSE(skip(true, {.collapse_after = 0}).applied);
  EXPECT_THAT(message_of([&] { (void)optimizer_.step({.collapse_after = -1}); }),
              HasSubstr("expected a collapse_after >= 0, got -1"));
}

TEST(Optimizer, OfNoParametersIsAMistakeButAGroupMayHaveNone) {
  const auto says_what_to_do = HasSubstr("expected parameters to train, got none (");
  EXPECT_THAT(message_of([] { FusedAdam{NamedTensors{}}; }), says_what_to_do);
  EXPECT_THAT(message_of([] { FusedSGD(std::vector<ParameterGroup>{}, SgdOptions{}); }),
              HasSubstr("expected at least one parameter group, got none"));
  EXPECT_THAT(message_of([] {
                FusedSGD{{ParameterGroup{}, ParameterGroup{}}, {}};
              }),
              says_what_to_do);
  const FusedAdam optimizer({{.parameters = {make_parameter("w", {2}, 1)}}, {.parameters = {}}},
                            {});
  EXPECT_EQ(optimizer.groups().size(), 2u);
}

TEST(Optimizer, RejectsBadParametersNamingThem) {
  const NamedTensor good = make_parameter("good", {2}, 1);
  const auto error_of = [](const NamedTensors& parameters) {
    return message_of([&] { FusedSGD(parameters, {}); });
  };
  EXPECT_THAT(error_of({good, good}), HasSubstr("'good' again"));
  EXPECT_THAT(error_of({good, {"good", make_parameter("x", {2}, 1).tensor}}),
              HasSubstr("'good' again"));
  EXPECT_THAT(error_of({{"", good.tensor}}), HasSubstr("empty name"));
  EXPECT_THAT(error_of({{"u", Tensor()}}), HasSubstr("'u', got an undefined"));
  EXPECT_THAT(error_of({make_parameter("wide", {2}, 1, DType::f64)}), HasSubstr("'wide' of f64"));
  const Tensor whole = Tensor::zeros({4, 4});
  EXPECT_THAT(error_of({{"gaps", whole.alias(whole.view().slice(1, 0, 2))}}), HasSubstr("dense"));
}

TEST(Optimizer, RejectsImpossibleOptions) {
  const NamedTensors parameters = two();
  const AdamOptions wrong[] = {
      {.lr = -1}, {.lr = kNaN}, {.beta1 = 1.0}, {.eps = -1e-8}, {.weight_decay = -0.1}};
  for (const AdamOptions& options : wrong) {
    EXPECT_THROW(FusedAdam(parameters, options), core::InvalidArgument);
  }
  EXPECT_THROW(FusedSGD(parameters, {.momentum = -0.1}), core::InvalidArgument);
  EXPECT_THROW(FusedSGD(parameters, {.nesterov = true}), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::optim
