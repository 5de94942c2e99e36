#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "gradient_check.h"
#include "support/cpu_only.h"

namespace cairn::autograd {
namespace {

using testing::check_gradients;
using testing::CheckOptions;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;
using testing::strided_leaf;

// Convolutions have no f64 kernels; they are linear in each input, so a large step is exact.
constexpr CheckOptions kLinearInF32{.step = 0.5, .tolerance = 2e-5};

Tensor leaf32(const Shape& shape, unsigned seed) {
  return leaf(shape, seed, -1, 1, DType::f32);
}

TEST(Matmul, HasTheGradientsOfItsFormula) {
  const auto f = [](const Tensors& x) { return matmul(x[0], x[1]); };
  check_gradients(f, {leaf({3, 4}, 1), leaf({4, 5}, 2)});
  check_gradients(f, {strided_leaf({3, 4}, 1), strided_leaf({4, 5}, 2)});
  check_gradients(f, {leaf({2, 3, 4}, 1), leaf({2, 4, 5}, 2)});
  check_gradients(f, {leaf({2, 3, 4}, 1), leaf({4, 5}, 2)});
  check_gradients(f, {leaf({3, 4}, 1), leaf({2, 4, 5}, 2)});
  check_gradients(f, {leaf({2, 1, 3, 4}, 1), leaf({3, 4, 2}, 2)});
  check_gradients(f, {leaf({3, 0}, 1), leaf({0, 5}, 2)});
  check_gradients(f, {leaf({0, 4}, 1), leaf({4, 5}, 2)});
}

TEST(Matmul, TakesTransposesByStride) {
  check_gradients([](const Tensors& x) { return matmul(transpose(x[0], 0, 1), x[1]); },
                  {leaf({4, 3}, 1), leaf({4, 5}, 2)});
  check_gradients([](const Tensors& x) { return matmul(x[0], transpose(x[0], -1, -2)); },
                  {leaf({2, 3, 4}, 1)});
}

TEST(Matmul, NamesShapesThatDoNotFit) {
  EXPECT_THAT(error_of([] { matmul(leaf({2, 3}, 1), leaf({4, 5}, 1)); }), HasSubstr("[4, 5]"));
  EXPECT_THAT(error_of([] { matmul(leaf({3}, 1), leaf({3, 5}, 1)); }), HasSubstr("matmul"));
  EXPECT_THAT(error_of([] { matmul(leaf({2, 3}, 1), leaf32({3, 2}, 1)); }), HasSubstr("dtype"));
}

class LinearOp : public ::testing::TestWithParam<Activation> {};

TEST_P(LinearOp, HasTheGradientsOfItsFormula) {
  const auto f = [](const Tensors& x) { return linear(x[0], x[1], x[2], GetParam()); };
  check_gradients(f, {leaf({3, 4}, 1), leaf({5, 4}, 2), leaf({5}, 3)});
  check_gradients(f, {leaf({2, 3, 4}, 1), leaf({5, 4}, 2), leaf({5}, 3)});
  check_gradients(f, {leaf({4}, 1), leaf({5, 4}, 2), Tensor()});
  check_gradients(f, {strided_leaf({2, 3, 4}, 1), strided_leaf({5, 4}, 2), leaf({5}, 3)});
  check_gradients(f, {random_tensor({3, 4}, 1), leaf({5, 4}, 2), leaf({5}, 3)});
  check_gradients(f, {leaf({0, 4}, 1), leaf({5, 4}, 2), leaf({5}, 3)});
}

TEST_P(LinearOp, IsTheCompositionOfItsParts) {
  const Tensor x = random_tensor({6, 4}, 1), w = random_tensor({3, 4}, 2),
               b = random_tensor({3}, 3);
  Tensor y = matmul(x, transpose(w, 0, 1)) + b;
  if (GetParam() == Activation::relu) y = relu(y);
  if (GetParam() == Activation::gelu) y = gelu(y);
  if (GetParam() == Activation::gelu_tanh) y = gelu(y, true);
  expect_close(linear(x, w, b, GetParam()), y.to_vector(), 1e-13);
}

INSTANTIATE_TEST_SUITE_P(Activations, LinearOp,
                         ::testing::Values(Activation::none, Activation::relu, Activation::gelu,
                                           Activation::gelu_tanh));

TEST(Linear, NamesWhatDoesNotFit) {
  EXPECT_THAT(error_of([] { linear(leaf({2, 3}, 1), leaf({5, 4}, 1)); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(error_of([] {
                linear(leaf({2, 4}, 1), leaf({5, 4}, 1), leaf({4}, 1));
              }),
              HasSubstr("bias [5]"));
  EXPECT_THAT(error_of([] { linear(leaf({2, 4}, 1), Tensor()); }), HasSubstr("weight"));
}

TEST(Linear, AccumulatesWeightGradientsInPlace) {
  const Tensor x = random_tensor({6, 4}, 1), w = leaf({3, 4}, 2), b = leaf({3}, 3);
  backward(sum(linear(x, w, b)));
  const void* place = w.grad().raw_data();
  std::vector<double> dw = w.grad().to_vector();
  backward(sum(linear(x, w, b)));
  for (double& v : dw) v *= 2;
  expect_close(w.grad(), dw, 1e-13);
  EXPECT_EQ(w.grad().raw_data(), place);
  expect_close(b.grad(), {12, 12, 12}, 1e-13);
}

TEST(Conv2d, HasTheGradientsOfItsFormula) {
  const auto check = [](const kernels::Conv2dOptions& options, const Shape& x, const Shape& w) {
    const auto f = [=](const Tensors& in) { return conv2d(in[0], in[1], in[2], options); };
    check_gradients(f, {leaf32(x, 1), leaf32(w, 2), leaf32({w[0]}, 3)}, kLinearInF32);
    check_gradients(f, {leaf32(x, 1), leaf32(w, 2), Tensor()}, kLinearInF32);
  };
  check({}, {2, 3, 5, 4}, {4, 3, 3, 2});
  check({.stride = {2, 1}, .padding = {1, 2}}, {1, 2, 5, 5}, {3, 2, 3, 3});
  check({.padding = {1, 1}, .groups = 2}, {2, 4, 3, 3}, {6, 2, 3, 3});
  check({.padding = {2, 2}, .dilation = {2, 2}}, {1, 2, 4, 4}, {2, 2, 3, 3});
  check({}, {0, 2, 4, 4}, {3, 2, 3, 3});
}

TEST(Conv2d, GivesChannelsLastImagesAndAddsToGradientsThatAreThere) {
  const Tensor x = random_tensor({2, 3, 5, 5}, 1, -1, 1, DType::f32);
  const Tensor w = leaf32({4, 3, 3, 3}, 2), b = leaf32({4}, 3);
  const Tensor y = conv2d(channels_last(x), w, b);
  EXPECT_TRUE(y.view().is_channels_last());
  backward(sum(y));
  std::vector<double> dw = w.grad().to_vector();
  b.gradient_slot().clear();  // one of the two is fresh now, the other adds
  backward(sum(conv2d(x, w, b)));
  for (double& v : dw) v *= 2;
  expect_close(w.grad(), dw, 1e-5);
  expect_close(b.grad(), {18, 18, 18, 18}, 1e-6);
  w.gradient_slot().clear();
  backward(sum(conv2d(x, w, b)));
  for (double& v : dw) v /= 2;
  expect_close(w.grad(), dw, 1e-5);
  expect_close(b.grad(), {36, 36, 36, 36}, 1e-6);
}

TEST(Conv2d, BiasAloneMayWantAGradient) {
  const Tensor x = random_tensor({2, 3, 5, 5}, 1, -1, 1, DType::f32);
  const Tensor w = random_tensor({4, 3, 3, 3}, 2, -1, 1, DType::f32), b = leaf32({4}, 3);
  backward(sum(conv2d(x, w, b)));
  expect_close(b.grad(), {18, 18, 18, 18}, 1e-6);
}

TEST(Conv2d, NamesWhatDoesNotFit) {
  EXPECT_THAT(error_of([] {
                conv2d(leaf32({1, 3, 4, 4}, 1), leaf32({2, 2, 3, 3}, 1));
              }),
              HasSubstr("conv2d"));
  EXPECT_THAT(error_of([] {
                conv2d(leaf32({3, 4, 4}, 1), leaf32({2, 3, 3, 3}, 1));
              }),
              HasSubstr("[3, 4, 4]"));
}

TEST(ConvTranspose2d, HasTheGradientsOfItsFormula) {
  const auto check = [](const kernels::Conv2dOptions& options, std::array<std::int64_t, 2> extra,
                        const Shape& x, const Shape& w) {
    const auto f = [=](const Tensors& in) {
      return conv_transpose2d(in[0], in[1], in[2], options, extra);
    };
    const std::int64_t O = w[1] * options.groups;
    check_gradients(f, {leaf32(x, 1), leaf32(w, 2), leaf32({O}, 3)}, kLinearInF32);
    check_gradients(f, {leaf32(x, 1), leaf32(w, 2), Tensor()}, kLinearInF32);
  };
  check({}, {0, 0}, {2, 3, 3, 4}, {3, 2, 3, 3});
  check({.stride = {2, 2}, .padding = {1, 1}}, {1, 1}, {1, 2, 3, 3}, {2, 3, 3, 3});
  check({.stride = {2, 1}, .groups = 2}, {1, 0}, {1, 4, 2, 3}, {4, 1, 2, 2});
}

TEST(ConvTranspose2d, AddsToABiasGradientThatIsThere) {
  const Tensor x = random_tensor({2, 3, 4, 4}, 1, -1, 1, DType::f32);
  const Tensor weight = random_tensor({3, 2, 2, 2}, 2, -1, 1, DType::f32), bias = leaf32({2}, 3);
  for (int i = 0; i < 2; ++i) backward(sum(conv_transpose2d(x, weight, bias)));
  expect_close(bias.grad(), {2 * 2 * 25, 2 * 2 * 25}, 1e-6);
}

// Of the places of a kernel over a slice: 1 and four times 0.003, each nothing beside 1 in bf16.
TEST(Conv3d, SumsTheGradientOfASliceInF32) {
  const Tensor x = Tensor::zeros({1, 1, 9, 1, 1}, DType::bf16).set_requires_grad(true);
  const Tensor weight = Tensor::from(std::vector<double>{1, 0.003, 0.003, 0.003, 0.003},
                                     {1, 1, 5, 1, 1}, DType::bf16);
  backward(sum(conv3d(x, weight)));
  EXPECT_EQ(x.grad().to_vector()[4], 1.015625);
}

TEST(ConvTranspose2d, IsTheTransposeOfConv2d) {
  // <conv(x), y> = <x, conv_transpose(y)>
  const kernels::Conv2dOptions options{.stride = {2, 2}, .padding = {1, 1}};
  const Tensor x = random_tensor({1, 2, 7, 7}, 1, -1, 1, DType::f32);
  const Tensor w = random_tensor({3, 2, 3, 3}, 2, -1, 1, DType::f32);
  const Tensor forward = conv2d(x, w, {}, options);
  const Tensor y = random_tensor(forward.shape(), 3, -1, 1, DType::f32);
  const Tensor back = conv_transpose2d(y, w, {}, options);
  EXPECT_EQ(back.shape(), x.shape());
  EXPECT_NEAR(sum(forward * y).item(), sum(back * x).item(), 1e-4);
}

TEST(ConvTranspose2d, NamesWhatDoesNotFit) {
  const Tensor x = leaf32({1, 2, 3, 3}, 1), w = leaf32({2, 3, 3, 3}, 2);
  EXPECT_THAT(error_of([&] {
                conv_transpose2d(x, w, {}, {}, {1, 1});
              }),
              HasSubstr("output_padding"));
  EXPECT_THAT(error_of([&] {
                conv_transpose2d(x, leaf32({3, 2, 3, 3}, 2));
              }),
              HasSubstr("[1, 2, 3, 3]"));
}

TEST(Pools, HaveTheGradientsOfTheirFormula) {
  const kernels::Pool2dOptions odd{.kernel = {3, 2}, .stride = {2, 1}, .padding = {1, 0}};
  for (const kernels::Pool2dOptions& options : {kernels::Pool2dOptions{}, odd}) {
    for (const bool last : {false, true}) {
      const auto image = [=](const Tensor& x) { return last ? channels_last(x) : x; };
      check_gradients([=](const Tensors& x) { return max_pool2d(image(x[0]), options); },
                      {leaf({2, 3, 5, 6}, 1)});
      check_gradients([=](const Tensors& x) { return avg_pool2d(image(x[0]), options); },
                      {leaf({2, 3, 5, 6}, 1)});
    }
  }
  check_gradients([](const Tensors& x) { return global_avg_pool2d(x[0]); },
                  {leaf({2, 3, 4, 5}, 1)});
  check_gradients([](const Tensors& x) { return max_pool2d(x[0]); }, {leaf({0, 3, 4, 4}, 1)});
  EXPECT_EQ(global_avg_pool2d(leaf({2, 3, 4, 5}, 1)).shape(), (Shape{2, 3}));
  EXPECT_TRUE(max_pool2d(channels_last(leaf({2, 3, 4, 4}, 1))).view().is_channels_last());
  EXPECT_THAT(error_of([] { max_pool2d(leaf({2, 3, 4}, 1)); }), HasSubstr("pool2d"));
}

TEST(Embedding, AddsRowsOfRepeatedIndices) {
  const Tensor index = Tensor::from(std::vector<std::int64_t>{2, 0, 2, 1, 2, 0}, {2, 3});
  Tensor w = leaf({4, 3}, 1);
  EXPECT_EQ(embedding(w, index).shape(), (Shape{2, 3, 3}));
  check_gradients([&](const Tensors& x) { return embedding(x[0], index); }, {w});
  w.clear_grad();
  backward(sum(embedding(w, index)));
  backward(sum(embedding(w, index)));
  expect_close(w.grad(), {4, 4, 4, 2, 2, 2, 6, 6, 6, 0, 0, 0}, 0);
  CAIRN_CPU_ONLY("a GPU would have to be waited for");
  const Tensor wrong = Tensor::from(std::vector<std::int64_t>{4}, {1});
  EXPECT_THAT(error_of([&] { embedding(w, wrong); }), HasSubstr("4"));
}

// softmax(q k^T / sqrt(D)) v by the definition.
Tensor attention_reference(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  const Tensor weights = softmax(matmul(q, transpose(k, -1, -2)) * scale, {.causal = causal});
  return matmul(weights, v);
}

TEST(Attention, IsTheCompositionOfItsParts) {
  for (const bool causal : {false, true}) {
    const Tensor q = leaf({2, 3, 5, 4}, 1), k = leaf({2, 3, 6, 4}, 2), v = leaf({2, 3, 6, 4}, 3);
    const auto f = [=](const Tensors& x) {
      return scaled_dot_product_attention(x[0], x[1], x[2], causal);
    };
    expect_close(f({q, k, v}), attention_reference(q, k, v, causal).to_vector(), 1e-12);
    check_gradients(f, {q, k, v});
  }
}

TEST(Attention, PaddedKeysAreNotSeen) {
  const Tensor q = leaf({3, 2, 4, 3}, 1), k = leaf({3, 2, 5, 3}, 2), v = leaf({3, 2, 5, 3}, 3);
  const Tensor lengths = Tensor::from(std::vector<std::int64_t>{3, 0, 5}, {3});
  for (const bool causal : {false, true}) {
    const auto f = [=](const Tensors& x) {
      return scaled_dot_product_attention(x[0], x[1], x[2], causal, 0.0, lengths);
    };
    const Tensor weights = softmax(matmul(q, transpose(k, -1, -2)) * (1.0 / std::sqrt(3.0)),
                                   {.causal = causal}, lengths);
    expect_close(f({q, k, v}), matmul(weights, v).to_vector(), 1e-12);
    check_gradients(f, {q, k, v});
    check_gradients(
        [=](const Tensors& x) { return softmax(x[0], {.causal = causal, .scale = 0.7}, lengths); },
        {leaf({3, 4, 5}, 4)});
  }
  const Tensor qkv = leaf({3, 4, 12}, 5), x = leaf({2, 3}, 6);
  const Tensor of_self = Tensor::from(std::vector<std::int64_t>{4, 1, 2}, {3});
  check_gradients([=](const Tensors& in) { return self_attention(in[0], 2, false, 0.0, of_self); },
                  {qkv});
  EXPECT_THAT(error_of([&] { self_attention(qkv, 2, true, 0.0, x); }), HasSubstr("of shape [3]"));
  EXPECT_THAT(error_of([&] { softmax(x, {.lengths = lengths}); }),
              HasSubstr("a tensor of their own"));
}

TEST(Attention, ThePackedFormIsTheSame) {
  const std::int64_t B = 2, T = 5, H = 2, D = 3;
  const Tensor qkv = leaf({B, T, 3 * H * D}, 1);
  const Tensor parts = permute(reshape(qkv, {B, T, 3, H, D}), {2, 0, 3, 1, 4});
  const auto part = [&](std::int64_t i) {
    return reshape(contiguous(slice(parts, 0, i, i + 1)), {B, H, T, D});
  };
  for (const bool causal : {false, true}) {
    const Tensor apart = scaled_dot_product_attention(part(0), part(1), part(2), causal);
    const Tensor joined = reshape(contiguous(permute(apart, {0, 2, 1, 3})), {B, T, H * D});
    expect_close(self_attention(qkv, H, causal), joined.to_vector(), 1e-12);
    check_gradients([=](const Tensors& x) { return self_attention(x[0], H, causal); }, {qkv});
  }
  EXPECT_THAT(error_of([&] { self_attention(qkv, 5, true); }), HasSubstr("[2, 5, 18]"));
}

// x [B, G, S, D], each head `times` times.
Tensor repeat_heads(const Tensor& x, std::int64_t times) {
  Tensors heads;
  for (std::int64_t i = 0; i < x.size(1) * times; ++i)
    heads.push_back(slice(x, 1, i / times, i / times + 1));
  return concat(heads, 1);
}

TEST(Attention, HeadsOfQueriesShareThoseOfKeys) {
  const Tensor q = leaf({2, 6, 4, 3}, 1), k = leaf({2, 2, 5, 3}, 2), v = leaf({2, 2, 5, 3}, 3);
  for (const bool causal : {false, true}) {
    const auto f = [=](const Tensors& x) {
      return scaled_dot_product_attention(x[0], x[1], x[2], causal);
    };
    const Tensor expected = attention_reference(q, repeat_heads(k, 3), repeat_heads(v, 3), causal);
    expect_close(f({q, k, v}), expected.to_vector(), 1e-12);
    check_gradients(f, {q, k, v});
  }
  const auto refused = [&](const Tensor& keys) {
    return error_of([&] { scaled_dot_product_attention(q, keys, keys, true); });
  };
  EXPECT_THAT(refused(leaf({2, 4, 5, 3}, 4)), HasSubstr("q [2, 6, 4, 3] and k [2, 4, 5, 3]"));
}

TEST(Attention, ThePackedFormHasFewerHeadsOfKeys) {
  const std::int64_t B = 2, T = 5, H = 4, G = 2, D = 3;
  const Tensor qkv = leaf({B, T, (H + 2 * G) * D}, 1);
  const Tensor heads = permute(reshape(qkv, {B, T, H + 2 * G, D}), {0, 2, 1, 3});
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    return contiguous(slice(heads, 1, begin, end));
  };
  const Tensor apart =
      scaled_dot_product_attention(part(0, H), part(H, H + G), part(H + G, H + 2 * G), true);
  const auto f = [=](const Tensors& x) { return self_attention(x[0], H, true, 0.0, {}, G); };
  const Tensor joined = reshape(contiguous(permute(apart, {0, 2, 1, 3})), {B, T, H * D});
  expect_close(f({qkv}), joined.to_vector(), 1e-12);
  check_gradients(f, {qkv});
  EXPECT_THAT(error_of([&] { self_attention(qkv, H, true, 0.0, {}, 3); }),
              HasSubstr("expected heads that are a multiple of kv_heads, got 4 and 3"));
  EXPECT_THAT(error_of([&] { self_attention(qkv, 6, true, 0.0, {}, 2); }),
              HasSubstr("6 heads and 2 of keys and of values, got [2, 5, 24]"));
}

TEST(Attention, DropoutDrawsTheSameMaskInTheBackward) {
  const auto f = [](const Tensors& x) {
    manual_seed(4);
    return self_attention(x[0], 2, true, 0.4);
  };
  check_gradients(f, {leaf({2, 5, 12}, 1)});
}

TEST(Attention, RunsInHalf) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor q = leaf({1, 2, 9, 8}, 1, -1, 1, dtype);
    const Tensor y = scaled_dot_product_attention(q, q, q, true);
    const Tensor wide = to(q, DType::f32);
    expect_close(y, attention_reference(wide, wide, wide, true).to_vector(),
                 dtype == DType::f16 ? 4e-3 : 3e-2);
    backward(sum(y));
    EXPECT_EQ(q.grad().dtype(), dtype);
  }
}

}  // namespace
}  // namespace cairn::autograd
