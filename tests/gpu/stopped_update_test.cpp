// A GPU that refuses one call of a step: what threw has changed nothing, or the optimizer says that
// it stopped after a part of the weights.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include "gpu/vendor_support.h"
#include "optim/support.h"

namespace cairn::test {
namespace {

using optim::Rule;

constexpr Device kGpu{DeviceType::cuda, 0};

struct Case {
  Rule rule;
  bool capturable = false;
  std::string call;
  int error = cudaErrorInvalidValue;
};

class StoppedUpdate : public testing::TestWithParam<Case> {
 protected:
  ~StoppedUpdate() override { gpusim::clear_injected(); }
};

/// Two groups after a first step.
struct Training {
  explicit Training(const Case& c)
      : parameters{optim::make_parameter("first", {40, 5}, 1, DType::f16, kGpu),
                   optim::make_parameter("second", {300}, 2, DType::f32, kGpu)},
        optimizer(c.rule.make({{{parameters[0]}, 1e-2, 0.01}, {{parameters[1]}, 1e-3}})) {
    optimizer->set_capturable(c.capturable);
    step(1);
  }
  void step(std::uint64_t seed) {
    optim::write_gradients(parameters, seed);
    (void)optimizer->step({.check = true});
  }
  std::vector<Values> all() const { return everything(parameters, *optimizer); }

  NamedTensors parameters;
  std::unique_ptr<optim::Optimizer> optimizer;
};

/// Whether the nth such call of a step was there to be refused.
bool refused(const Case& c, std::uint64_t nth, const std::vector<Values>& expected) {
  Training training(c);
  optim::write_gradients(training.parameters, 2);
  core::release_cached_memory(kGpu);
  gpusim::inject(c.call, nth, c.error);
  std::string thrown;
  try {
    (void)training.optimizer->step({.check = true});
  } catch (const core::Error& error) {
    thrown = error.what();
  }
  gpusim::clear_injected();
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
  EXPECT_GT(nth, 3u);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Rule& rule : optim::rules()) {
    if (rule.name != "Adam" && rule.name != "Lamb") continue;
    for (const bool capturable : {false, true}) {
      all.push_back({rule, capturable, "cudaLaunchKernel"});
      all.push_back({rule, capturable, "cudaMalloc", cudaErrorMemoryAllocation});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Rules, StoppedUpdate, testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.rule.name + (info.param.capturable ? "Capturable" : "") + info.param.call;
});

}  // namespace
}  // namespace cairn::test
