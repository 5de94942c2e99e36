// States of PyTorch's optimizers, in and out (tests/golden/make_torch_state.py).
#include <gmock/gmock.h>

#include <set>
#include <sstream>

#include "support.h"
#include "support/golden.h"

namespace cairn::optim {
namespace {

using testing::HasSubstr;

using Groups = std::vector<ParameterGroup>;

const std::vector<std::string> kTorchStateNames = {"matrix", "vector", "scalar"};
const std::set<std::string> kHowTorchComputes = {"foreach", "capturable", "differentiable",
                                                 "fused"};

const test::Golden& golden() {
  static const test::Golden file("torch_state");
  return file;
}

std::vector<std::string> split(const std::string& name) {
  std::vector<std::string> parts;
  std::istringstream text(name);
  for (std::string part; std::getline(text, part, '.');) parts.push_back(part);
  return parts;
}

/// The state_dict() that PyTorch saved, as StateDict: nested again, every value a tensor.
StateDict torch_state(const std::string& name) {
  StateDict state;
  for (const std::string& key : golden().names()) {
    if (key.rfind(name + ".state.", 0) != 0 && key.rfind(name + ".param_groups.", 0) != 0) continue;
    const std::vector<std::string> path = split(key.substr(name.size() + 1));
    StateDict* at = &state;
    for (std::size_t i = 0; i + 1 < path.size(); ++i) at = &at->make_dict(path[i]);
    const bool moment = path[0] == "state" && path.back() != "step";
    at->set(path.back(), golden().tensor(key, moment ? DType::f32 : DType::f64));
  }
  return state;
}

/// As torch's of that name in the file.
std::vector<Rule> torch_rules() {
  using test::maker;
  return {
      {"adam", maker<FusedAdam>(AdamOptions{.lr = 1, .adamw = false})},
      {"adamw", maker<FusedAdam>(AdamOptions{.lr = 1})},
      {"sgd", maker<FusedSGD>(SgdOptions{.lr = 1})},
      {"sgd_momentum", maker<FusedSGD>(SgdOptions{.lr = 1, .momentum = 0.5, .dampening = 0.25})},
      {"sgd_nesterov", maker<FusedSGD>(SgdOptions{.lr = 1, .momentum = 0.5, .nesterov = true})},
      {"rmsprop", maker<FusedRMSprop>(RmsPropOptions{.lr = 1, .alpha = 0.9})},
      {"rmsprop_momentum",
       maker<FusedRMSprop>(RmsPropOptions{.lr = 1, .alpha = 0.9, .momentum = 0.8})},
      {"adagrad",
       maker<FusedAdagrad>(AdagradOptions{.lr = 1, .lr_decay = 0.02, .initial_accumulator = 0.1})},
  };
}

NamedTensors parameters_at(const std::string& prefix) {
  NamedTensors parameters;
  for (const std::string& name : kTorchStateNames) {
    Tensor tensor = golden().tensor(prefix + "." + name);
    tensor.set_requires_grad(true);
    parameters.push_back({"net." + name, tensor});
  }
  return parameters;
}

Groups groups_of(const NamedTensors& p, double lr0 = 7, double lr1 = 7, double decay = 0) {
  return {{{p[0]}, lr0, decay}, {{p[1], p[2]}, lr1, decay}};
}

void train(Optimizer& optimizer, const NamedTensors& parameters, int begin, int end) {
  for (int k = begin; k < end; ++k) {
    for (std::size_t i = 0; i < 3; ++i) {
      if (i == 2 && k < 3) continue;  // its gradient comes late
      write_gradient(parameters[i].tensor,
                     golden().values(core::str("gradient.", k, ".", kTorchStateNames[i])));
    }
    expect_applied(optimizer.step());
  }
}

class TorchState : public testing::TestWithParam<Rule> {};

TEST_P(TorchState, ContinuesWhatPyTorchBegan) {
  const Rule& c = GetParam();
  const NamedTensors parameters = parameters_at(c.name + ".weight5");
  const auto optimizer = c.make(groups_of(parameters));
  optimizer->load_torch_state_dict(torch_state(c.name));
  train(*optimizer, parameters, 5, 10);
  expect_weights(parameters, values(parameters_at(c.name + ".weight10")), 4e-6, 2e-6);
}

TEST_P(TorchState, WritesWhatPyTorchWrites) {
  const Rule& c = GetParam();
  const NamedTensors parameters = parameters_at("init");
  const auto optimizer = c.make(groups_of(parameters));
  StateDict begin = torch_state(c.name);  // its options, without its state
  begin.make_dict("state") = {};
  optimizer->load_torch_state_dict(begin);
  train(*optimizer, parameters, 0, 5);
  expect_weights(parameters, values(parameters_at(c.name + ".weight5")), 4e-6, 2e-6);

  std::map<std::string, Values> ours = test::flat(optimizer->torch_state_dict());
  for (const auto& [name, expected] : test::flat(torch_state(c.name))) {
    const std::string key = split(name).back();
    if (kHowTorchComputes.count(key) > 0) continue;
    ASSERT_TRUE(ours.count(name)) << name;
    test::expect_close(ours[name], expected, 4e-6, 2e-6, name);
    ours.erase(name);
  }
  for (const auto& [name, value] : ours) ADD_FAILURE() << "torch has no " << name;
}

TEST_P(TorchState, RoundTripsBitForBit) {
  const Rule& c = GetParam();
  const NamedTensors a = parameters_at("init"), b = parameters_at("init");
  const auto first = c.make(groups_of(a, 0.1, 0.05, 0.01));
  train(*first, a, 0, 5);
  copy_values(a, b);
  const auto second = c.make(groups_of(b));
  second->load_torch_state_dict(snapshot(first->torch_state_dict()));
  train(*first, a, 5, 10);
  train(*second, b, 5, 10);
  EXPECT_EQ(values(a), values(b));
}
INSTANTIATE_TEST_SUITE_P(Optimizers, TorchState, testing::ValuesIn(torch_rules()),
                         [](const auto& info) { return info.param.name; });

std::string error_of(Optimizer& optimizer, const StateDict& state) {
  return message_of<core::Error>([&] { optimizer.load_torch_state_dict(state); });
}

TEST(TorchStateErrors, NamesWhatDiffersAndChangesNothing) {
  const NamedTensors parameters = parameters_at("init");
  FusedAdam adam(groups_of(parameters), AdamOptions{});
  EXPECT_THAT(error_of(adam, torch_state("adam")), HasSubstr("decoupled_weight_decay = 1, got 0"));
  EXPECT_THAT(error_of(adam, torch_state("sgd")), HasSubstr("betas"));
  StateDict amsgrad = torch_state("adamw");
  amsgrad.make_dict("param_groups").make_dict("1").set("amsgrad", std::int64_t{1});
  EXPECT_THAT(error_of(adam, amsgrad), HasSubstr("amsgrad = 0, got 1"));
  StateDict shape = torch_state("adamw");
  shape.make_dict("state").make_dict("0").set("exp_avg", Tensor::zeros({5, 3}));
  EXPECT_THAT(error_of(adam, shape), HasSubstr("'net.matrix.exp_avg' of shape"));
  EXPECT_EQ(adam.lr(), 7);
  FusedAdam single(parameters);
  EXPECT_THAT(error_of(single, torch_state("adamw")), HasSubstr("1 parameter groups, got 2"));
  FusedAdam fewer({{{parameters[0]}, 1, 0}, {{parameters[1]}, 1, 0}}, {});
  EXPECT_THAT(error_of(fewer, torch_state("adamw")), HasSubstr("1 parameters in group 1, got 2"));
  FusedSGD plain(groups_of(parameters), SgdOptions{.dampening = 0.25});
  EXPECT_THAT(error_of(plain, torch_state("sgd_momentum")),
              HasSubstr("surplus 'net.matrix.momentum_buffer'"));
  EXPECT_THAT(error_of(plain, StateDict()), HasSubstr("2 parameter groups, got 0"));
}

// As torch.distributed.checkpoint and DeepSpeed have it: of equal shapes no other thing tells.
TEST(TorchStateNames, SayWhoseMomentsTheyAre) {
  const auto parameter = [](const char* name, std::uint64_t seed) {
    return make_parameter(name, {5}, seed, DType::f32, Device{});
  };
  const NamedTensors a = {parameter("net.a", 1), parameter("net.b", 2)};
  const NamedTensors b = {parameter("net.a", 1), parameter("net.b", 2)};
  FusedAdam first(a), second(b);
  write_gradients(a, 1);
  expect_applied(first.step());
  write_gradients(b, 1);
  expect_applied(second.step());
  StateDict state = snapshot(first.torch_state_dict());
  const auto rename = [&](const char* zero, const char* one) {
    StateDict& params = state.make_dict("param_groups").make_dict("0").make_dict("params");
    params = {};
    params.set("0", std::string(zero));
    params.set("1", std::string(one));
  };
  StateDict& entries = state.make_dict("state");
  const StateDict of_a = entries.dict("0"), of_b = entries.dict("1");
  entries = {};
  entries.set("a", of_a);
  entries.set("b", of_b);
  for (const auto& names : {std::pair("a", "b"), std::pair("b", "a")}) {
    rename(names.first, names.second);
    second.load_torch_state_dict(state);
    EXPECT_EQ(test::flat(second.torch_state_dict()), test::flat(first.torch_state_dict()));
  }
  entries.set("c", of_b);
  rename("a", "c");
  EXPECT_THAT(error_of(second, state), HasSubstr("got none for 'net.b'"));
  const NamedTensors ends = {parameter("deep.net", 1), parameter("net", 2)};
  FusedAdam third(ends);
  rename("other.deep.net", "other.net");
  EXPECT_THAT(error_of(third, state), HasSubstr("got one that may be several for"));
}

TEST(TorchStateErrors, RefusesWhatTorchLacks) {
  const NamedTensors p = parameters_at("init");
  const auto expect_refused = [](const Optimizer& optimizer) {
    EXPECT_THROW(optimizer.torch_state_dict(), core::Unsupported);
  };
  expect_refused(FusedLAMB(p));
  expect_refused(FusedAdam(p, {.bias_correction = false}));
  expect_refused(FusedSGD(p, {.weight_decay = 0.1, .wd_after_momentum = true}));
  expect_refused(FusedAdagrad(p, {.weight_decay = 0.1, .adagrad_w = true}));
}

}  // namespace
}  // namespace cairn::optim
