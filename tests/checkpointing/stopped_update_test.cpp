// An update that a device broke off is undone by a resume in the same objects.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optimizer.h"
#include "checkpointing/temporary_folder.h"
#include "support/cpu_only.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::checkpointing {
namespace {

using test::message_of;
using ::testing::HasSubstr;

/// w -= g, on the CPU. A device that fails has updated the first parameter.
class PlainDescent : public optim::Optimizer {
 public:
  explicit PlainDescent(const NamedTensors& parameters) : Optimizer({{parameters, 1.0}}) {}
  bool device_fails = false;

 protected:
  void update_group(const optim::ParameterGroup& /*group*/, const Entries& entries,
                    const Call& /*call*/) override {
    for (const kernels::UpdateEntry& entry : entries) {
      for (std::int64_t i = 0; i < entry.weight.numel(); ++i)
        entry.weight.as<float>()[i] -= entry.gradient.as<float>()[i];
      if (device_fails) core::fail<core::DeviceError>("descent", "expected a device, got none");
    }
  }
  const char* kind() const override { return "PlainDescent"; }
  std::vector<std::string> moment_names() const override { return {}; }
  std::vector<RuleOption> rule_options() const override { return {}; }
};

struct Training {
  Training() : optimizer(model.parameters()), state({{"model", model}, {"optimizer", optimizer}}) {}
  void write_gradients() {
    optimizer.clear_grad();
    autograd::backward(autograd::sum(model(Tensor::full({2, 3}, 0.5))));
  }
  std::vector<double> weights() const { return model.parameters()[0].tensor.to_vector(); }
  void stop() {
    write_gradients();
    optimizer.device_fails = true;
    EXPECT_THROW((void)optimizer.step(), core::DeviceError);
    optimizer.device_fails = false;
  }
  void expect_stopped() {
    write_gradients();
    EXPECT_THAT(message_of([&] { (void)optimizer.step(); }), HasSubstr("resume from a checkpoint"));
  }

  nn::Sequential model = nn::Sequential(nn::Linear(3, 4));
  PlainDescent optimizer;
  TrainingState state;
};

class StoppedUpdate : public ::testing::Test {
 protected:
  void SetUp() override { CAIRN_CPU_ONLY("it computes on the host"); }
};

TEST_F(StoppedUpdate, IsNotSavedAndIsResumedInPlace) {
  const TemporaryFolder folder;
  Training training;
  const std::string saved = training.state.save(folder.string(), 1);
  const std::vector<double> before = training.weights();
  training.stop();
  EXPECT_NE(training.weights(), before);
  EXPECT_THAT(message_of([&] { training.state.save(folder.string(), 2); }),
              HasSubstr("resume from a checkpoint"));
  training.state.resume(saved);
  EXPECT_EQ(training.weights(), before);
  training.write_gradients();
  EXPECT_TRUE(training.optimizer.step().applied);
}

TEST_F(StoppedUpdate, HasStoppedAfterAResumeThatFails) {
  const TemporaryFolder folder;
  Training training;
  nn::Sequential wider(nn::Linear(5, 4));
  PlainDescent other(training.model.parameters());
  const std::string misfit =
      TrainingState({{"optimizer", other}, {"model", wider}}).save(folder.string(), 1);
  training.stop();
  EXPECT_THROW(training.state.resume(misfit), core::DataError);
  training.expect_stopped();
}

}  // namespace
}  // namespace cairn::checkpointing
