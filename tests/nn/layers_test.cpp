#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"

namespace cairn::nn {
namespace {

using ::testing::HasSubstr;

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

struct Moments {
  double mean, deviation, largest;
};

Moments moments(const Tensor& x) {
  const std::vector<double> v = x.to_vector();
  const auto n = static_cast<double>(v.size());
  const double mean = std::accumulate(v.begin(), v.end(), 0.0) / n;
  double squares = 0, largest = 0;
  for (double value : v) {
    squares += (value - mean) * (value - mean);
    largest = std::max(largest, std::abs(value));
  }
  return {mean, std::sqrt(squares / n), largest};
}

void expect_uniform(const Tensor& x, double bound) {
  const Moments m = moments(x);
  EXPECT_LE(m.largest, bound);
  EXPECT_GT(m.largest, 0.97 * bound);
  const double standard_error = bound / std::sqrt(3.0 * static_cast<double>(x.numel()));
  EXPECT_NEAR(m.mean, 0.0, 4 * standard_error);
  EXPECT_NEAR(m.deviation, bound / std::sqrt(3.0), 2 * standard_error);
}

TEST(Init, LinearAndConvolutionsStartAsInPyTorch) {
  manual_seed(1);
  const Linear linear(64, 200);
  expect_uniform(linear.weight(), 1 / 8.0);
  expect_uniform(linear.bias(), 1 / 8.0);
  const Conv2d conv(8, 200, 5, {.groups = 2});
  expect_uniform(conv.weight(), 1 / 10.0);
  expect_uniform(conv.bias(), 1 / 10.0);
  const ConvTranspose2d transpose(200, 16, 5);
  expect_uniform(transpose.weight(), 1 / 20.0);
}

TEST(Init, EmbeddingIsNormalAndNormsAreTheIdentity) {
  manual_seed(1);
  const Moments m = moments(Embedding(100, 64).weight());
  EXPECT_NEAR(m.mean, 0.0, 0.05);
  EXPECT_NEAR(m.deviation, 1.0, 0.05);
  const BatchNorm2d norm(3);
  EXPECT_EQ(norm.weight().to_vector(), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(norm.bias().to_vector(), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(norm.running_mean().to_vector(), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(norm.running_var().to_vector(), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(LayerNorm(2).weight().to_vector(), (std::vector<double>{1, 1}));
}

TEST(Init, FollowsTheSeed) {
  manual_seed(7);
  const Linear a(5, 3);
  manual_seed(7);
  const Linear b(5, 3);
  const Linear c(5, 3);
  EXPECT_EQ(a.weight().to_vector(), b.weight().to_vector());
  EXPECT_NE(a.weight().to_vector(), c.weight().to_vector());
}

TEST(Init, FillsHalfTensorsAndNamesWrongOnes) {
  manual_seed(1);
  const Tensor x = Tensor::empty({50, 40}, DType::f16);
  init::xavier_uniform(x);
  expect_uniform(x, std::sqrt(6.0 / 90.0) + 1e-4);
  init::normal(x, 2.0, 0.5);
  EXPECT_NEAR(moments(x).mean, 2.0, 0.05);
  init::constant(x, 3.0);
  EXPECT_EQ(moments(x).deviation, 0.0);
  EXPECT_THAT(error_of([] { init::kaiming_uniform(Tensor::empty({3}), 0.0); }), HasSubstr("[3]"));
}

TEST(Layers, HaveTheirShapes) {
  const Tensor image = Tensor::full({2, 4, 8, 6}, 0.5);
  EXPECT_EQ(Conv2d(4, 6, {3, 2}, {.stride = 2, .padding = {1, 0}})(image).shape(),
            (Shape{2, 6, 4, 3}));
  EXPECT_EQ(ConvTranspose2d(4, 6, 3, {.stride = 2, .output_padding = 1})(image).shape(),
            (Shape{2, 6, 18, 14}));
  EXPECT_EQ(MaxPool2d(2)(image).shape(), (Shape{2, 4, 4, 3}));
  EXPECT_EQ(MaxPool2d(3, {.stride = 1, .padding = 1})(image).shape(), (Shape{2, 4, 8, 6}));
  EXPECT_EQ(AvgPool2d({2, 3})(image).shape(), (Shape{2, 4, 4, 2}));
  EXPECT_EQ(GlobalAvgPool2d()(image).shape(), (Shape{2, 4}));
  EXPECT_EQ(Flatten()(image).shape(), (Shape{2, 192}));
  EXPECT_EQ(BatchNorm2d(4)(image).shape(), image.shape());
  const Tensor tokens = Tensor::full({2, 5, 8}, 0.5);
  EXPECT_EQ(MultiheadAttention(8, 2)(tokens).shape(), tokens.shape());
  EXPECT_EQ(LayerNorm(8)(tokens).shape(), tokens.shape());
  EXPECT_EQ(RMSNorm(8)(tokens).shape(), tokens.shape());
  EXPECT_EQ(Linear(8, 3)(tokens).shape(), (Shape{2, 5, 3}));
  EXPECT_EQ(Embedding(10, 4)(Tensor::zeros({2, 3}, DType::i64)).shape(), (Shape{2, 3, 4}));
}

TEST(Layers, APReLUHasAWeightForEachChannel) {
  PReLU layer(2, 0.5);
  kernels::copy(Tensor::from<float>({0.5, 0.25}, {2}), layer.parameters()[0].tensor);
  const Tensor x = Tensor::from<float>({-1, 2, -3, -4}, {1, 2, 1, 2});
  EXPECT_EQ(layer(x).to_vector(), (std::vector<double>{-0.5, 2, -0.75, -1}));
  EXPECT_EQ(layer(Tensor::from<float>({-1, -1}, {1, 2})).to_vector(),
            (std::vector<double>{-0.5, -0.25}));
}

TEST(Layers, ComputeWhatTheirOpsCompute) {
  const Tensor x = Tensor::from(std::vector<float>{-2, -0.5, 0, 0.5, 2, 3}, {2, 3});
  const auto same = [](const Tensor& a, const Tensor& b) {
    EXPECT_EQ(a.to_vector(), b.to_vector());
  };
  same(ReLU()(x), autograd::relu(x));
  same(LeakyReLU(0.2)(x), autograd::leaky_relu(x, 0.2));
  same(GELU()(x), autograd::gelu(x));
  same(GELU({.tanh_approximation = true})(x), autograd::gelu(x, true));
  same(SiLU()(x), autograd::silu(x));
  same(ELU(0.5)(x), autograd::elu(x, 0.5));
  same(Softplus()(x), autograd::softplus(x));
  same(Mish()(x), autograd::mish(x));
  same(PReLU()(x), autograd::leaky_relu(x, 0.25));
  same(Sigmoid()(x), autograd::sigmoid(x));
  same(Tanh()(x), autograd::tanh(x));
  Linear linear(3, 2, {.activation = autograd::Activation::relu});
  same(linear(x), autograd::linear(x, linear.weight(), linear.bias(), autograd::Activation::relu));
  manual_seed(4);
  const Tensor dropped = Dropout(0.5)(x);
  manual_seed(4);
  same(dropped, autograd::dropout(x, 0.5));
}

TEST(Layers, BatchNormWithoutMomentumAveragesAllBatchesOnce) {
  BatchNorm1d norm(1, {.momentum = std::nullopt});
  const auto see = [&](double mean) {
    norm(Tensor::from(std::vector<double>{mean - 1, mean + 1}, {2, 1}, DType::f32));
  };
  see(3);
  EXPECT_NEAR(norm.buffers()[0].tensor.item(), 3, 1e-6);
  see(5);
  EXPECT_NEAR(norm.buffers()[0].tensor.item(), 4, 1e-6);
  autograd::ThreadState replay = autograd::ThreadState::capture();
  replay.recomputing = true;
  {
    const autograd::ThreadStateGuard guard(replay);
    see(5);
  }
  see(10);
  EXPECT_NEAR(norm.buffers()[0].tensor.item(), 6, 1e-6);
}

TEST(Layers, BatchNormFusesARelu) {
  manual_seed(1);
  const Tensor x = Tensor::empty({4, 3, 2, 2});
  init::normal(x);
  const Tensor fused = BatchNorm2d(3, {.relu = true})(x), apart = ReLU()(BatchNorm2d(3)(x));
  EXPECT_EQ(fused.to_vector(), apart.to_vector());
  EXPECT_TRUE(BatchNorm2d(3).is_batch_norm());
  EXPECT_TRUE(BatchNorm1d(3).is_batch_norm());
  EXPECT_FALSE(LayerNorm(3).is_batch_norm());
}

TEST(Layers, CausalAttentionDoesNotLookAhead) {
  manual_seed(2);
  const Tensor x = Tensor::empty({1, 4, 8});
  init::normal(x);
  MultiheadAttention attention(8, 2);
  const std::vector<double> before = attention(x).to_vector();
  const Tensor changed = x.alias(x.view().slice(1, 3, 4));
  init::constant(changed, 5.0);
  const std::vector<double> after = attention(x).to_vector();
  for (std::size_t i = 0; i < 24; ++i) EXPECT_EQ(before[i], after[i]) << i;
  EXPECT_NE(before[24], after[24]);
}

TEST(Layers, NameWrongInputsAndOptions) {
  const Tensor x = Tensor::zeros({2, 3});
  EXPECT_THAT(error_of([&] { BatchNorm1d(4)(x); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(error_of([&] { BatchNorm2d(3)(x); }), HasSubstr("BatchNorm2d"));
  EXPECT_THAT(error_of([&] { LayerNorm(4)(x); }), HasSubstr("[..., 4]"));
  EXPECT_THAT(error_of([&] { Linear(4, 2)(x); }), HasSubstr("linear"));
  EXPECT_THAT(error_of([&] { MultiheadAttention(8, 2)(x); }), HasSubstr("[B, T, 8]"));
  EXPECT_THAT(error_of([] { MultiheadAttention(8, 3); }), HasSubstr("8 and 3"));
  EXPECT_THAT(error_of([] { Conv2d(3, 4, 3, {.groups = 2}); }), HasSubstr("2"));
  EXPECT_THAT(error_of([] { Dropout(2.0); }), HasSubstr("2"));
  EXPECT_THAT(error_of([] { Sequential(ReLU()).at(1); }), HasSubstr("1"));
}

TEST(Training, ASmallConvNetLearns) {
  manual_seed(3);
  Sequential net(Conv2d(1, 8, 3, {.padding = 1}), BatchNorm2d(8), ReLU(), MaxPool2d(2), Flatten(),
                 Linear(32, 2));
  // Class 1 images are bright on the right.
  const Tensor images = Tensor::empty({16, 1, 4, 4});
  init::normal(images, 0.0, 0.3);
  std::vector<std::int64_t> classes;
  for (std::int64_t n = 0; n < 16; ++n) {
    classes.push_back(n % 2);
    if (n % 2 == 0) continue;
    const core::TensorView right = images.view().select(0, n).slice(2, 2, 4);
    kernels::affine(right, 1.0, 1.0, right);
  }
  const Tensor labels = Tensor::from(classes, {16});
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    net.clear_grad();
    const Tensor loss = cross_entropy(net(images), labels);
    autograd::backward(loss);
    for (const NamedTensor& p : net.parameters()) {
      kernels::axpby(-0.1, p.tensor.grad(), 1.0, p.tensor);
    }
    (step == 0 ? first : last) = loss.item();
  }
  EXPECT_GT(first, 0.4);
  EXPECT_LT(last, 0.05);
}

}  // namespace
}  // namespace cairn::nn
