// Saving and loading optimizers.
#include <gmock/gmock.h>

#include <cmath>

#include "support.h"

namespace cairn::optim {
namespace {

using test::said_by;
using testing::AllOf;
using testing::HasSubstr;

NamedTensors make_parameters(DType dtype = DType::f32) {
  return {make_parameter("net.0.weight", {3, 5}, 1, dtype),
          make_parameter("net.0.bias", {7}, 2, dtype), make_parameter("scale", {}, 3, dtype)};
}

void expect_bit_exact_resume(const Rule& rule, DType dtype) {
  const NamedTensors parameters = make_parameters(dtype), others = make_parameters(dtype);
  const auto optimizer = rule.make({{parameters, 0.01, 0.1}});
  for (int step = 0; step < 5; ++step) train(*optimizer, parameters, 10 * step);
  const StateDict state = snapshot(optimizer->state_dict());
  copy_values(parameters, others);
  const auto resumed = rule.make({{others, 123.0, 0.1}});
  resumed->load_state_dict(state);
  EXPECT_EQ(resumed->steps(), 5);
  for (int step = 5; step < 25; ++step) {
    train(*optimizer, parameters, 10 * step);
    train(*resumed, others, 10 * step);
    ASSERT_EQ(values(parameters), values(others)) << step;
  }
}

TEST(OptimizerState, ResumesBitExactly) {
  for (const Rule& rule : rules()) {
    SCOPED_TRACE(rule.name);
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      expect_bit_exact_resume(rule, dtype);
    }
  }
}

TEST(OptimizerState, LoadingCopies) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  FusedAdam optimizer(parameters), resumed(others);
  train(optimizer, parameters, 1);
  const StateDict state = optimizer.state_dict();
  const Values before = values(state.dict("state").dict("scale").tensor("exp_avg"));
  resumed.load_state_dict(state);
  train(resumed, others, 2);
  EXPECT_EQ(values(state.dict("state").dict("scale").tensor("exp_avg")), before);
}

TEST(OptimizerState, AFreshStateResetsTheMoments) {
  const NamedTensors parameters = make_parameters();
  FusedAdam optimizer(parameters);
  const StateDict fresh = optimizer.state_dict();
  train(optimizer, parameters, 1);
  optimizer.load_state_dict(fresh);
  EXPECT_EQ(optimizer.steps(), 0);
  EXPECT_FALSE(optimizer.state_dict().dict("state").dict("scale").contains("exp_avg"));
  write_gradient(parameters[2].tensor, {2.0});
  expect_applied(optimizer.step());  // from moments of 0: (1 - beta1) times the gradient
  EXPECT_NEAR(moment_of(optimizer, "scale").item(), 0.2, 1e-6);
}

TEST(OptimizerState, NamesMayBePrefixesOfEachOther) {
  const NamedTensors parameters = {make_parameter("a", {2}, 1), make_parameter("a.b", {3}, 2)};
  FusedAdam optimizer(parameters),
      resumed(NamedTensors{make_parameter("a", {2}, 1), make_parameter("a.b", {3}, 2)});
  train(optimizer, parameters, 1);
  resumed.load_state_dict(optimizer.state_dict());
  const StateDict state = resumed.state_dict();
  EXPECT_EQ(state.dict("state").dict("a").integer("step"), 1);
  EXPECT_EQ(state.dict("state").dict("a").dict("b").tensor("exp_avg").numel(), 3);
}

TEST(OptimizerState, ReportsEverythingWrongAtOnceAndChangesNothing) {
  NamedTensors parameters = make_parameters();
  FusedAdam optimizer(parameters, {.lr = 0.5});
  train(optimizer, parameters, 1);
  const auto before = test::everything(parameters, optimizer);

  const NamedTensors others = {make_parameter("net.0.weight", {5, 3}, 1),
                               make_parameter("scale", {}, 3), make_parameter("head", {2}, 4)};
  FusedAdam other(others, {.lr = 0.25});
  train(other, others, 1);
  StateDict state = snapshot(other.state_dict());
  StateDict& scale = state.make_dict("state").make_dict("scale");
  scale.set("exp_avg_sq", std::string("not a tensor"));
  EXPECT_THAT(
      message_of<core::DataError>([&] { optimizer.load_state_dict(state); }),
      AllOf(HasSubstr("'net.0.weight.exp_avg' of shape [5, 3]"), HasSubstr("instead of [3, 5]"),
            HasSubstr("no 'net.0.bias'"), HasSubstr("no 'scale.exp_avg_sq'"),
            HasSubstr("a surplus 'head'"), HasSubstr("nothing was changed")));
  EXPECT_EQ(optimizer.lr(), 0.5);
  EXPECT_EQ(test::everything(parameters, optimizer), before);
}

TEST(OptimizerState, RejectsImpossibleRatesAndCounts) {
  const Tensor w = Tensor::full({4}, 1.0);
  FusedAdam optimizer(NamedTensors{{"w", w}}, {.lr = 0.5});
  const StateDict good = optimizer.state_dict();
  for (const char* key : {"lr", "weight_decay"}) {
    for (const double value : {-1.0, std::nan("")}) {
      StateDict bad = good;
      bad.make_dict("groups").make_dict("0").set(key, value);
      EXPECT_THROW(optimizer.load_state_dict(bad), core::DataError) << key << ' ' << value;
    }
  }
  StateDict bad = good;
  bad.set("steps", std::int64_t{-1});
  EXPECT_THROW(optimizer.load_state_dict(bad), core::DataError);
  bad = good;
  bad.make_dict("state").make_dict("w").set("step", std::int64_t{-1});
  EXPECT_THROW(optimizer.load_state_dict(bad), core::DataError);
  EXPECT_EQ(optimizer.lr(), 0.5);
}

TEST(OptimizerState, RejectsOtherKindsAndGroupCounts) {
  const NamedTensors parameters = make_parameters();
  FusedAdam adam(parameters);
  FusedSGD sgd(make_parameters(), {.momentum = 0.9});
  EXPECT_THROW(adam.load_state_dict(sgd.state_dict()), core::DataError);
  FusedAdam two({{make_parameters(), 1, 0}, {{make_parameter("x", {2}, 1)}, 1, 0}}, {});
  EXPECT_THROW(adam.load_state_dict(two.state_dict()), core::DataError);
  EXPECT_THROW(adam.load_state_dict({}), core::DataError);

  FusedSGD with(make_parameters(), {.momentum = 0.9}), without(make_parameters(), {});
  for (FusedSGD* one : {&with, &without}) train(*one, one->groups()[0].parameters, 1);
  EXPECT_THROW(without.load_state_dict(with.state_dict()), core::DataError);
  EXPECT_THROW(with.load_state_dict(without.state_dict()), core::DataError);
}

TEST(OptimizerState, HoldsTheRunningNormsAndWhatGroupsHaveOfTheirOwn) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  const auto groups = [](const NamedTensors& p) {
    return std::vector<ParameterGroup>{{{p[0]}, 0.1, 0.0}, {{p[1], p[2]}, 0.2, 0.3}};
  };
  FusedNovoGrad optimizer(groups(parameters), NovoGradOptions{});
  optimizer.groups()[1].beta1 = 0.5;
  write_gradient(parameters[1].tensor, Values(7, 2.0));
  expect_applied(optimizer.step());
  const StateDict state = snapshot(optimizer.state_dict());
  EXPECT_NEAR(state.dict("state").dict("net").dict("0").dict("bias").number("norm"),
              std::sqrt(28.0), 1e-6);
  EXPECT_EQ(state.dict("groups").dict("1").number("beta1"), 0.5);
  EXPECT_EQ(state.dict("groups").dict("0").number("beta1"), NovoGradOptions{}.beta1);
  FusedNovoGrad resumed(groups(others), NovoGradOptions{});
  resumed.load_state_dict(state);
  EXPECT_EQ(resumed.groups()[1].beta1, 0.5);
  EXPECT_EQ(resumed.groups()[0].beta1, NovoGradOptions{}.beta1);
}

TEST(OptimizerState, MomentumThatIsSwitchedOnLater) {
  const NamedTensors parameters = make_parameters();
  FusedSGD optimizer(parameters, {.lr = 0.1});
  train(optimizer, parameters, 1);
  optimizer.groups()[0].momentum = 0.9;
  const StateDict state = snapshot(optimizer.state_dict());
  EXPECT_EQ(values(state.dict("state").dict("scale").tensor("momentum_buffer")), Values{0.0});
  FusedSGD resumed(make_parameters(), {.lr = 0.1, .momentum = 0.5});
  resumed.load_state_dict(state);
  EXPECT_EQ(resumed.groups()[0].momentum, 0.9);
}

TEST(OptimizerState, AnotherLearningRateIsTakenOverWithAWord) {
  FusedSGD saved(make_parameters(), {.lr = 0.25, .weight_decay = 0.5});
  FusedSGD loaded(make_parameters(), {.lr = 0.125});
  const auto load = [&] { return said_by([&] { loaded.load_state_dict(saved.state_dict()); }); };
  EXPECT_THAT(load(),
              AllOf(HasSubstr("FusedSGD: group 0 continues with lr 0.25 of the state, not 0.125"),
                    HasSubstr("continues with weight_decay 0.5 of the state, not 0")));
  EXPECT_EQ(loaded.lr(), 0.25);
  EXPECT_EQ(load(), "");  // they agree now
}

TEST(OptimizerState, OfAScheduledLearningRateOnlyTheBaseIsCompared) {
  FusedSGD optimizer(make_parameters(), {.lr = 1.0}), other(make_parameters(), {.lr = 1.0});
  Schedule schedule(optimizer, cosine(10)), resumed(other, cosine(10));
  schedule.step({});
  EXPECT_EQ(said_by([&] {
              other.load_state_dict(optimizer.state_dict());
              resumed.load_state_dict(schedule.state_dict());
            }),
            "");
  EXPECT_EQ(other.lr(), optimizer.lr());
  FusedSGD third(make_parameters(), {.lr = 3.0});
  Schedule of_third(third, cosine(10));
  EXPECT_THAT(said_by([&] { of_third.load_state_dict(schedule.state_dict()); }),
              HasSubstr("schedule: group 0 continues with lr 1 of the state, not 3"));
  EXPECT_EQ(third.lr(), optimizer.lr());
}

}  // namespace
}  // namespace cairn::optim
