// FusedAdam on a LeNet-like model, 100 iterations under a gradient scaler, against Adam in double
// precision on the same model; weights within 1e-3, gradients within 1e-3 (f32) and 5e-3 (half). In
// f32, and with half convolutions and f32 masters; each also capturable, with rate, step and
// verdict on the device.
#include <gtest/gtest.h>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/optimizer_access.h"
#include "optim/reference.h"
#include "support/tensors.h"

namespace cairn::conformance {
namespace {

constexpr int kSteps = 100;

nn::Sequential lenet(Device device) {
  manual_seed(0);
  nn::Sequential model(nn::Conv2d(1, 6, 5), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(6, 16, 5),
                       nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(), nn::Linear(256, 120),
                       nn::ReLU(), nn::Linear(120, 84), nn::ReLU(), nn::Linear(84, 10));
  model.to(device);
  return model;
}

/// Casts as the case says: convolutions to half, everything, or nothing.
enum class Casts { none, convolutions, all };

struct AdamCase {
  Device device;
  const char* name;
  Casts casts;
  DType half;
  bool capturable = false;
};

void set_value(const Tensor& parameter, const std::vector<double>& value) {
  kernels::copy(Tensor::from(value, parameter.shape(), DType::f32, parameter.device()), parameter);
}

std::vector<AdamCase> adam_cases() {
  std::vector<AdamCase> all;
  for (const Device device : test::fast_devices()) {
    all.push_back({device, "f32", Casts::none, DType::f32});
    all.push_back({device, "f16_convolutions", Casts::convolutions, DType::f16});
    all.push_back({device, "f16", Casts::all, DType::f16});
    all.push_back({device, "bf16", Casts::all, DType::bf16});
    all.push_back({device, "f32_capturable", Casts::none, DType::f32, true});
    all.push_back({device, "f16_convolutions_capturable", Casts::convolutions, DType::f16, true});
  }
  return all;
}

class AdamOnAModel : public testing::TestWithParam<AdamCase> {
 protected:
  /// Forward in the parameters' dtypes.
  static Tensor loss_of(nn::Sequential& model, const Tensor& x, const Tensor& target) {
    Tensor y = x;
    for (const auto& [name, module] : model.modules()) {
      if (name.empty()) continue;
      const NamedTensors parameters = module->parameters();
      if (!parameters.empty()) y = autograd::to(y, parameters.front().tensor.dtype());
      y = (*module)(y);
    }
    return autograd::mse_loss(autograd::to(y, DType::f32), target);
  }

  static void cast(nn::Sequential& model, const AdamCase& c) {
    for (const auto& [name, module] : model.modules()) {
      const bool convolution = module->kind() == "Conv2d";
      const bool casts = c.casts == Casts::all || (c.casts == Casts::convolutions && convolution);
      if (casts && !name.empty()) module->to(c.half);
    }
  }
};

TEST_P(AdamOnAModel, HundredStepsEqualAdam) {
  const AdamCase& c = GetParam();
  nn::Sequential model = lenet(c.device), twin = lenet(c.device);
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-5, .adamw = false});
  const NamedTensors ours = model.parameters(), theirs = twin.parameters();
  std::vector<optim::reference::Adam> references(ours.size(), {{.lr = 1e-5, .adamw = false}});
  std::vector<std::vector<double>> truths;
  for (const auto& [name, tensor] : ours) truths.push_back(tensor.to_vector<double>());
  cast(model, c);
  cast(twin, c);
  for (std::size_t p = 0; p < ours.size(); ++p) {
    if (!core::is_half(ours[p].tensor.dtype())) continue;
    kernels::MasterWeight::assign(
        ours[p].tensor, Tensor::from(truths[p], ours[p].tensor.shape(), DType::f32, c.device));
  }
  optim::OptimizerAccess(optimizer).refresh();
  optimizer.set_capturable(c.capturable);

  // Half weights that differ in their last bit switch single units of a ReLU in single images.
  const double tolerance = c.casts == Casts::none ? 1e-3 : 5e-3;
  amp::LossScaler scaler({.init_scale = 1024.0, .growth_interval = 30});
  for (int step = 0; step < kSteps; ++step) {
    const auto seed = static_cast<std::uint64_t>(step);
    const Tensor x = test::random_tensor({32, 1, 28, 28}, DType::f32, c.device, 2 * seed, 0, 1);
    const Tensor target = test::random_tensor({32, 10}, DType::f32, c.device, 2 * seed + 1, 0, 1);
    const double scale = scaler.scale();
    autograd::backward(autograd::affine(loss_of(model, x, target), scale, 0.0));
    autograd::backward(autograd::affine(loss_of(twin, x, target), scale, 0.0));
    for (std::size_t p = 0; p < ours.size(); ++p) {
      std::vector<double> a = ours[p].tensor.grad().to_vector<double>();
      std::vector<double> b = theirs[p].tensor.grad().to_vector<double>();
      references[p].update(truths[p], b, 1.0 / scale);
      for (std::vector<double>* g : {&a, &b}) {
        for (double& value : *g) value /= scale;
      }
      test::expect_close(a, b, 1e-3, tolerance, core::str("gradient of ", ours[p].name));
    }
    const optim::StepResult result = optimizer.step({.gradient_scale = 1.0 / scale});
    ASSERT_TRUE(result.applied) << result.reason;
    scaler.update(false);
    for (std::size_t p = 0; p < ours.size(); ++p) {
      set_value(theirs[p].tensor, truths[p]);
      Tensor(theirs[p].tensor).clear_grad();
    }
  }
  EXPECT_EQ(scaler.scale(), 8192.0);
  for (std::size_t p = 0; p < ours.size(); ++p) {
    test::expect_close(kernels::master_value(ours[p].tensor), truths[p], 1e-3, 1e-3, ours[p].name);
    // What they moved by, too: 100 steps of 1e-5 are as small as the tolerance.
    test::expect_close(kernels::master_value(ours[p].tensor), truths[p], 0,
                       c.casts == Casts::none ? 2e-6 : 3e-4, ours[p].name);
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, AdamOnAModel, testing::ValuesIn(adam_cases()),
                         [](const auto& info) {
                           return core::str(info.param.device.is_cuda() ? "cuda_" : "cpu_",
                                            info.param.name);
                         });

}  // namespace
}  // namespace cairn::conformance
