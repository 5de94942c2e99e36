// A GPU that refuses a kernel or memory in a step: what threw has changed nothing, or the optimizer
// says that it stopped after a part of the weights.
#include <gmock/gmock.h>

#include "gpu/refusal.h"
#include "optim/support.h"

namespace cairn::test {
namespace {

using optim::Rule;

struct Case {
  Rule rule;
  bool capturable = false;
  bool memory = false;  // is refused, else a kernel
};

class StoppedUpdate : public testing::TestWithParam<Case> {};

NamedTensors parameters_of(std::size_t count) {
  NamedTensors all{optim::make_parameter("first", {40, 5}, 1, DType::f16, kGpu)};
  while (all.size() < count)
    all.push_back(optim::make_parameter(core::str("p", all.size()), {20}, 2, DType::f32, kGpu));
  return all;
}

/// Two groups after a first step; a long list of the second takes memory of its own.
struct Training {
  explicit Training(const Case& c)
      : parameters(parameters_of(c.memory ? 150 : 3)),
        optimizer(c.rule.make(
            {{{parameters[0]}, 1e-2, 0.01}, {{parameters.begin() + 1, parameters.end()}, 1e-3}})) {
    optimizer->set_capturable(c.capturable);
    options.check = !c.memory;
    step(1);
  }
  void step(std::uint64_t seed) {
    optim::write_gradients(parameters, seed);
    (void)optimizer->step(options);
  }
  std::vector<Values> all() const { return everything(parameters, *optimizer); }

  NamedTensors parameters;
  std::unique_ptr<optim::Optimizer> optimizer;
  optim::StepOptions options;
};

/// Whether a step threw, and left what it should.
bool refused(const Case& c, std::uint64_t nth, const std::vector<Values>& expected) {
  Training training(c);
  optim::write_gradients(training.parameters, 2);
  std::string thrown;
  try {
    const Refusal refusal(c.memory, nth);
    (void)training.optimizer->step(training.options);
  } catch (const core::Error& error) {
    thrown = error.what();
  }
  if (thrown.empty()) return false;
  const std::string again = message_of([&] { training.step(2); });
  if (again == "nothing thrown") {
    EXPECT_EQ(training.all(), expected) << thrown;
  } else {
    EXPECT_THAT(again, testing::HasSubstr("stopped after a part of the weights")) << thrown;
  }
  return true;
}

TEST_P(StoppedUpdate, OrNone) {
  const Case& c = GetParam();
  Training undisturbed(c);
  undisturbed.step(2);
  const std::vector<Values> expected = undisturbed.all();
  std::uint64_t nth = 1;
  while (refused(c, nth, expected)) ++nth;
  EXPECT_GT(nth, 1u);
}

/// Without a norm to clip by, which would take more memory than the update.
std::vector<Case> cases() {
  const Rule adam{"Adam", maker<optim::FusedAdam>(optim::AdamOptions{})},
      lamb{"Lamb", maker<optim::FusedLAMB>(optim::LambOptions{.max_gradient_norm = 0})};
  std::vector<Case> all;
  for (const bool capturable : {false, true}) {
    all.push_back({adam, capturable, false});
    all.push_back({lamb, capturable, false});
    all.push_back({lamb, capturable, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Rules, StoppedUpdate, testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.rule.name + (info.param.capturable ? "Capturable" : "") +
         (info.param.memory ? "LacksMemory" : "LacksAKernel");
});

}  // namespace
}  // namespace cairn::test
