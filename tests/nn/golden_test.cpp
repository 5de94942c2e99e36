// Whole models against PyTorch: outputs, loss, every gradient and the running statistics.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cairn/autograd/autograd.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "support/golden.h"

namespace cairn::nn {
namespace {

const test::Golden& golden() {
  static const test::Golden values("nn");
  return values;
}

void expect_golden(const Tensor& got, const std::string& name, double tolerance) {
  ASSERT_TRUE(got.defined()) << name;
  ASSERT_EQ(got.shape(), golden().shape(name)) << name;
  const std::vector<double>& expected = golden().values(name);
  const std::vector<double> values = got.to_vector();
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], tolerance * (1 + std::abs(expected[i])))
        << name << " " << i;
  }
}

void take_parameters(Module& model, const std::string& prefix) {
  for (const NamedTensor& entry : model.parameters()) {
    const Tensor value = golden().tensor(prefix + ".parameter." + entry.name);
    ASSERT_EQ(value.shape(), entry.tensor.shape()) << entry.name;
    kernels::copy(value, entry.tensor);
  }
}

// Runs the model forward and backward and compares everything.
void check(Module& model, const std::string& prefix, Tensor x, double tolerance) {
  take_parameters(model, prefix);
  if (core::is_floating(x.dtype())) x.set_requires_grad(true);
  const Tensor y = model(x);
  expect_golden(y, prefix + ".y", tolerance);
  const Tensor target = golden().tensor(prefix + ".target", DType::i64);
  const Tensor loss = cross_entropy(y, target, {.label_smoothing = 0.1});
  expect_golden(loss, prefix + ".loss", tolerance);
  autograd::backward(loss);
  if (x.requires_grad()) expect_golden(x.grad(), prefix + ".dx", tolerance);
  for (const NamedTensor& entry : model.parameters()) {
    expect_golden(entry.tensor.grad(), prefix + ".gradient." + entry.name, tolerance);
  }
  for (const NamedTensor& entry : model.buffers()) {
    expect_golden(entry.tensor, prefix + ".buffer." + entry.name, tolerance);
  }
}

Sequential conv_net() {
  return Sequential(
      Conv2d(2, 4, 3, {.padding = 1}), BatchNorm2d(4), ReLU(), MaxPool2d(2),
      ConvTranspose2d(4, 6, 3, {.stride = 2, .padding = 1, .output_padding = 1, .groups = 2}),
      SiLU(), Conv2d(6, 4, 3, {.stride = 2, .groups = 2, .bias = false}), LeakyReLU(0.1),
      AvgPool2d(2), Flatten(), Linear(4, 5));
}

TEST(Golden, AConvNetIsPyTorchs) {
  Sequential model = conv_net();
  check(model, "conv", golden().tensor("conv.x"), 2e-5);
}

// As in make_nn.py; the head is the embedding's weight.
class Gpt : public Module {
 public:
  Gpt()
      : token_(add_module("token", Embedding(11, 8))),
        norm1_(add_module("norm1", LayerNorm(8))),
        norm2_(add_module("norm2", LayerNorm(8))),
        norm3_(add_module("norm3", RMSNorm(8))),
        attention_(add_module("attention", MultiheadAttention(8, 2))),
        up_(add_module("up", Linear(8, 32, {.activation = autograd::Activation::gelu_tanh}))),
        down_(add_module("down", Linear(32, 8))) {}
  std::string kind() const override { return "Gpt"; }
  Tensor forward(const Tensor& index) override {
    return autograd::linear(features(index), token_->weight());
  }
  Tensor features(const Tensor& index) {
    Tensor x = (*token_)(index);
    x = x + (*attention_)((*norm1_)(x));
    x = x + (*down_)((*up_)((*norm2_)(x)));
    return (*norm3_)(x);
  }
  const Tensor& head() const { return token_->weight(); }

 private:
  std::shared_ptr<Embedding> token_;
  std::shared_ptr<LayerNorm> norm1_, norm2_;
  std::shared_ptr<RMSNorm> norm3_;
  std::shared_ptr<MultiheadAttention> attention_;
  std::shared_ptr<Linear> up_, down_;
};

TEST(Golden, ATransformerWithTiedWeightsIsPyTorchs) {
  Gpt model;
  check(model, "gpt", golden().tensor("gpt.x", DType::i64), 2e-5);
}

TEST(Golden, TheSameWithoutLogitsIsPyTorchsToo) {
  for (const bool recompute : {false, true}) {
    Gpt model;
    take_parameters(model, "gpt");
    const Tensor x = model.features(golden().tensor("gpt.x", DType::i64));
    const Tensor target = golden().tensor("gpt.target", DType::i64);
    const Tensor loss =
        linear_cross_entropy(x, model.head(), {}, target, {.label_smoothing = 0.1}, recompute);
    expect_golden(loss, "gpt.loss", 2e-5);
    autograd::backward(loss);
    for (const NamedTensor& entry : model.parameters()) {
      expect_golden(entry.tensor.grad(), "gpt.gradient." + entry.name, 2e-5);
    }
  }
}

TEST(Golden, AutocastStaysNearF32) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Sequential model = conv_net();
    take_parameters(model, "conv");
    Tensor y, loss;
    {
      const autograd::AutocastGuard autocast(true, dtype);
      y = model(golden().tensor("conv.x"));
      loss = cross_entropy(y, golden().tensor("conv.target", DType::i64), {.label_smoothing = 0.1});
    }
    EXPECT_EQ(y.dtype(), dtype);
    autograd::backward(loss);
    const double tolerance = dtype == DType::f16 ? 0.02 : 0.1;
    expect_golden(y, "conv.y", tolerance);
    for (const NamedTensor& entry : model.parameters()) {
      EXPECT_EQ(entry.tensor.grad().dtype(), DType::f32) << entry.name;
      expect_golden(entry.tensor.grad(), "conv.gradient." + entry.name, tolerance);
    }
  }
}

}  // namespace
}  // namespace cairn::nn
