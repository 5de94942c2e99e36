// FusedAdam, FusedSGD, FusedAdagrad and clipping against PyTorch's
// (tests/golden/make_optim.py).
#include <functional>
#include <memory>

#include "support.h"
#include "support/golden.h"

namespace cairn::optim {
namespace {

constexpr int kSteps = 10;
const std::vector<std::string> kNames = {"matrix", "vector", "scalar"};
const std::vector<std::string> kMoments = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"};

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(NamedTensors)> make;
  StepOptions options;
};

std::vector<Case> cases() {
  using test::maker;
  const auto adamw = maker<FusedAdam>(AdamOptions{.lr = 1e-2, .weight_decay = 0.1});
  const auto sgd = maker<FusedSGD>(SgdOptions{.lr = 0.1});
  return {
      {"adam", maker<FusedAdam>(AdamOptions{.lr = 1e-2, .adamw = false})},
      {"adam_l2", maker<FusedAdam>(AdamOptions{.lr = 1e-2,
                                               .beta1 = 0.8,
                                               .beta2 = 0.95,
                                               .eps = 1e-6,
                                               .weight_decay = 0.05,
                                               .adamw = false})},
      {"adamw", adamw},
      {"adamw_clipped", adamw, {.max_gradient_norm = 3.0}},
      {"adamw_clipped_inf", adamw, {.max_gradient_norm = 1.5, .norm_type = kInf}},
      {"sgd_clipped_1", sgd, {.max_gradient_norm = 10.0, .norm_type = 1.0}},
      {"sgd_clipped_3", sgd, {.max_gradient_norm = 2.0, .norm_type = 3.0}},
      {"adagrad", maker<FusedAdagrad>(AdagradOptions{.lr = 0.1})},
      {"adagrad_decay", maker<FusedAdagrad>(AdagradOptions{.lr = 0.1,
                                                           .eps = 1e-6,
                                                           .weight_decay = 0.05,
                                                           .lr_decay = 0.05,
                                                           .initial_accumulator = 0.2})},
      {"rmsprop", maker<FusedRMSprop>(RmsPropOptions{})},
      {"rmsprop_momentum",
       maker<FusedRMSprop>(RmsPropOptions{
           .lr = 0.02, .alpha = 0.9, .eps = 1e-6, .momentum = 0.8, .weight_decay = 0.05})},
      {"sgd", sgd},
      {"sgd_decay", maker<FusedSGD>(SgdOptions{.lr = 0.1, .weight_decay = 0.05})},
      {"sgd_momentum", maker<FusedSGD>(SgdOptions{
                           .lr = 0.1, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.05})},
      {"sgd_nesterov", maker<FusedSGD>(SgdOptions{
                           .lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true})},
  };
}

class Golden : public testing::TestWithParam<Device> {};

TEST_P(Golden, EqualsPyTorch) {
  const test::Golden golden("optim");
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    NamedTensors parameters;
    for (const std::string& name : kNames) {
      Tensor tensor = golden.tensor("init." + name, DType::f32, GetParam());
      parameters.push_back({name, tensor.set_requires_grad(true)});
    }
    const auto optimizer = c.make(parameters);
    for (int k = 0; k < kSteps; ++k) {
      const std::string step = std::to_string(k);
      for (const auto& [name, tensor] : parameters) {
        write_gradient(tensor, golden.values("gradient." + step + "." + name));
      }
      const StepResult result = optimizer->step(c.options);
      expect_applied(result);
      if (c.options.max_gradient_norm == 0) continue;
      const double norm = golden.values(c.name + ".norm." + step).front();
      EXPECT_NEAR(result.gradient_norm, norm, 1e-5 * norm);
    }
    for (const auto& [name, tensor] : parameters) {
      test::expect_close(tensor, golden.values(c.name + ".weight." + name), 2e-6, 2e-7, name);
      for (const std::string& moment : kMoments) {
        const std::string expected = c.name + "." + moment + "." + name;
        if (!golden.contains(expected)) continue;
        // Sums of terms of size 1: a few of their roundings are left where they cancel.
        test::expect_close(moment_of(*optimizer, name, moment), golden.values(expected), 2e-6, 1e-6,
                           moment);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Golden, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::optim
