// Apex's run_fp16util: a nested net converted to half, with and without affine batch norms.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"

namespace cairn {
namespace {

class Block : public nn::Module {
 public:
  Block()
      : conv_(add_module("conv", nn::Conv2d(10, 10, 2))),
        norm_(add_module("bn", nn::BatchNorm2d(10, {.affine = true}))) {}
  std::string kind() const override { return "Block"; }
  Tensor forward(const Tensor& x) override { return (*conv_)((*norm_)(x)); }

 private:
  std::shared_ptr<nn::Conv2d> conv_;
  std::shared_ptr<nn::BatchNorm2d> norm_;
};

class Net : public nn::Module {
 public:
  Net()
      : conv1_(add_module("conv1", nn::Conv2d(3, 10, 2))),
        plain_(add_module("bn1", nn::BatchNorm2d(10, {.affine = false}))),
        block1_(add_module("db1", Block())),
        block2_(add_module("db2", Block())) {}
  std::string kind() const override { return "Net"; }
  Tensor forward(const Tensor& x) override {
    result = (*block2_)((*block1_)((*plain_)((*conv1_)(x))));
    return result;
  }
  Tensor result;  // before the output cast

 private:
  std::shared_ptr<nn::Conv2d> conv1_;
  std::shared_ptr<nn::BatchNorm2d> plain_;
  std::shared_ptr<Block> block1_, block2_;
};

class HalfConversion : public ::testing::TestWithParam<DType> {};

TEST_P(HalfConversion, AffineBatchNormsStayF32AndTheRestIsHalf) {
  Net net;
  optim::FusedSGD optimizer(net.parameters(), {.lr = 0.1});
  amp::Amp precision =
      amp::initialize(net, optimizer, {.opt_level = amp::OptLevel::O2, .half_dtype = GetParam()});
  int norms = 0, others = 0;
  for (const auto& [name, tensor] : net.parameters()) {
    const bool norm = name.find("bn") != name.npos;
    EXPECT_EQ(tensor.dtype(), norm ? DType::f32 : GetParam()) << name;
    ++(norm ? norms : others);
  }
  EXPECT_EQ(norms, 4);  // of the two affine ones
  EXPECT_EQ(others, 6);
  // Apex casts the statistics of batch norms without weights to half; Cairn keeps all of them f32.
  for (const auto& [name, tensor] : net.buffers()) EXPECT_EQ(tensor.dtype(), DType::f32) << name;
}

TEST_P(HalfConversion, TheResultIsHalf) {
  Net net;
  optim::FusedSGD optimizer(net.parameters(), {.lr = 0.1});
  amp::Amp precision =
      amp::initialize(net, optimizer, {.opt_level = amp::OptLevel::O2, .half_dtype = GetParam()});
  const Tensor x = Tensor::full({64, 3, 16, 32}, 0.5);
  const Tensor y = net(x);
  EXPECT_EQ(net.result.dtype(), GetParam());
  EXPECT_EQ(net.result.shape(), (Shape{64, 10, 13, 29}));
  EXPECT_EQ(y.dtype(), DType::f32);  // the model's edge
  autograd::backward(autograd::sum(y));
  for (const auto& [name, tensor] : net.parameters()) {
    ASSERT_TRUE(tensor.grad().defined()) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Halves, HalfConversion, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(core::name(info.param)); });

}  // namespace
}  // namespace cairn
