// Layers and their operations against PyTorch's values and gradients (tests/golden/make_layers.py),
// and against central differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "autograd/gradient_check.h"
#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "torch_cases.h"

namespace cairn::nn {
namespace {

using autograd::Tensors;
using autograd::testing::check_gradients;
using autograd::testing::leaf;
using autograd::testing::random_tensor;
using ::testing::HasSubstr;

template <class F>
std::string layer_refusal_of(F&& f) {
  return autograd::testing::error_of(std::forward<F>(f));
}

const TorchCases& torch_layers() {
  static const TorchCases cases("layers");
  return cases;
}

/// A module that is called with one tensor.
template <class M>
void compare_layer(const std::string& name, M layer) {
  torch_layers().compare_module<M>(name, layer,
                                   [](M& m, const Tensor& a, const Tensor&) { return m(a); });
}

// ---- Convolutions

TEST(Conv1d, IsPyTorchs) {
  torch_layers().compare("conv1d", [](const Tensor& a, const Tensor& b) {
    return autograd::conv1d(a, b, {}, {.stride = 2, .padding = 3, .dilation = 2, .groups = 3});
  });
  compare_layer("conv1d_module", Conv1d(6, 4, 3, {.padding = 1}));
}

TEST(Conv1d, HasItsCentralDifferences) {
  check_gradients(
      [](const Tensors& x) { return autograd::conv1d(x[0], x[1], x[2], {.padding = 1}); },
      {leaf({2, 2, 5}, 1, -1, 1, DType::f32), leaf({3, 2, 3}, 2, -1, 1, DType::f32),
       leaf({3}, 3, -1, 1, DType::f32)},
      {.step = 0.125, .tolerance = 2e-4});
}

TEST(Conv1d, IsHalfInARegionAndNamesWhatDoesNotFit) {
  Conv1d conv(4, 2, 3);
  {
    const autograd::AutocastGuard autocast(true, DType::bf16);
    EXPECT_EQ(conv(random_tensor({2, 4, 6}, 1, -1, 1, DType::f32)).dtype(), DType::bf16);
  }
  EXPECT_THAT(layer_refusal_of([&] {
                conv(random_tensor({4, 6}, 1, -1, 1, DType::f32));
              }),
              HasSubstr("expected x [N, I, L]"));
  EXPECT_THAT(layer_refusal_of([] { Conv1d(4, 2, 0); }), HasSubstr("positive channels and kernel"));
  EXPECT_THAT(layer_refusal_of([] { Conv1d(4, 2, 3, {.groups = 3}); }),
              HasSubstr("multiples of groups"));
  EXPECT_EQ(Conv1d(4, 2, 3, {.stride = 2, .groups = 2}).extra(), "4 -> 2, 3, stride 2, 2 groups");
}

TEST(Conv1d, ChainsWithoutCopies) {  // results lie channels-last, and are taken so
  Conv1d first(4, 8, 3), second(8, 8, 3);
  const autograd::NoGradGuard no_grad;
  const Tensor y = first(random_tensor({2, 4, 9}, 1, -1, 1, DType::f32));
  EXPECT_TRUE(autograd::reshape(y, {2, 8, 1, 7}).view().is_channels_last());
}

TEST(Conv3d, IsPyTorchs) {
  torch_layers().compare(
      "conv3d",
      [](const Tensor& a, const Tensor& b) {
        return autograd::conv3d(
            a, b, {},
            {.stride = {2, 1, 2}, .padding = {1, 0, 1}, .dilation = {1, 2, 1}, .groups = 2});
      },
      1e-5);
  torch_layers().compare(
      "conv3d.dilated",
      [](const Tensor& a, const Tensor& b) {
        return autograd::conv3d(a, b, {},
                                {.stride = {3, 1, 1}, .padding = {2, 0, 0}, .dilation = {2, 1, 1}});
      },
      1e-5);
  compare_layer("conv3d_module", Conv3d(4, 3, {1, 3, 2}));
}

TEST(Conv3d, IsHalfInARegionAndNamesWhatDoesNotFit) {
  Conv3d conv(2, 3, 2);
  const Tensor x = random_tensor({1, 2, 3, 3, 3}, 1, -1, 1, DType::f32);
  {
    const autograd::AutocastGuard autocast(true, DType::bf16);
    EXPECT_EQ(conv(x).dtype(), DType::bf16);
    const autograd::CastPolicyGuard policies({{"conv3d", autograd::CastPolicy::f32}});
    EXPECT_EQ(conv(x).dtype(), DType::f32);
  }
  EXPECT_THAT(layer_refusal_of([&] { conv(autograd::slice(x, 2, 0, 1)); }),
              HasSubstr("depth of at least the kernel's"));
  EXPECT_THAT(layer_refusal_of([&] { conv(autograd::select(x, 2, 0)); }),
              HasSubstr("[N, I, D, H, W]"));
}

TEST(Conv3d, ThenBatchNormThenConv3d) {  // through strided results
  Sequential net(Conv3d(2, 4, 3, {.padding = 1}), BatchNorm3d(4), ReLU(), Conv3d(4, 2, 2));
  const Tensor x = random_tensor({2, 2, 4, 4, 4}, 1, -1, 1, DType::f32).set_requires_grad(true);
  const Tensor y = net(x);
  EXPECT_EQ(y.shape(), (Shape{2, 2, 3, 3, 3}));
  autograd::backward(autograd::sum(y * y));
  EXPECT_EQ(x.grad().shape(), x.shape());
}

// ---- Pools and resampling

TEST(Resampling, IsPyTorchs) {
  using autograd::ResampleMode;
  for (const auto& [height, width] : {std::pair{8, 10}, {7, 3}, {2, 9}, {1, 1}}) {
    const std::array<std::int64_t, 2> size{height, width};
    const std::string of = core::str(".", height, "x", width);
    const auto by = [&](const autograd::ResampleOptions& options) {
      return
          [=](const Tensor& x, const Tensor&) { return autograd::interpolate(x, size, options); };
    };
    torch_layers().compare("nearest" + of, by({ResampleMode::nearest}));
    torch_layers().compare("bilinear" + of, by({ResampleMode::bilinear}));
    torch_layers().compare("aligned" + of, by({ResampleMode::bilinear, true}));
    torch_layers().compare("adaptive_avg" + of, by({ResampleMode::area}));
    torch_layers().compare("adaptive_avg" + of, [&](const Tensor& x, const Tensor&) {
      return AdaptiveAvgPool2d(Size2(size[0], size[1]))(x);
    });
    torch_layers().compare("adaptive_max" + of, [&](const Tensor& x, const Tensor&) {
      return AdaptiveMaxPool2d(Size2(size[0], size[1]))(x);
    });
  }
  torch_layers().compare("nearest.8x10",
                         [](const Tensor& x, const Tensor&) { return Upsample(2)(x); });
  torch_layers().compare("aligned.8x10", [](const Tensor& x, const Tensor&) {
    return Upsample(2, {.mode = ResampleMode::bilinear, .align_corners = true})(x);
  });
}

TEST(Resampling, HasItsCentralDifferences) {
  using autograd::ResampleMode;
  for (const autograd::ResampleOptions& options : {autograd::ResampleOptions{ResampleMode::nearest},
                                                   {ResampleMode::bilinear},
                                                   {ResampleMode::bilinear, true},
                                                   {ResampleMode::area}}) {
    for (const bool last : {false, true}) {
      const auto f = [&](const Tensors& x) {
        return autograd::interpolate(last ? autograd::channels_last(x[0]) : x[0], {5, 2}, options);
      };
      check_gradients(f, {leaf({2, 3, 3, 4}, 1)});
    }
  }
  check_gradients(
      [](const Tensors& x) {
        return autograd::adaptive_max_pool2d(x[0], {3, 2});
      },
      {leaf({2, 2, 4, 5}, 1)});
}

TEST(Resampling, IsF32InARegionPoolsKeep) {
  const Tensor x = random_tensor({1, 2, 4, 4}, 1, -1, 1, DType::bf16);
  const autograd::AutocastGuard autocast(true, DType::bf16);
  EXPECT_EQ(Upsample(2)(x).dtype(), DType::f32);
  EXPECT_EQ(AdaptiveAvgPool2d(2)(x).dtype(), DType::bf16);
  EXPECT_EQ(AdaptiveMaxPool2d(2)(x).dtype(), DType::bf16);
}

TEST(Resampling, KeepsTheStorageAndNamesWhatDoesNotFit) {
  const Tensor x = autograd::channels_last(random_tensor({2, 3, 4, 4}, 1, -1, 1, DType::f32));
  EXPECT_TRUE(Upsample(3)(x).view().is_channels_last());
  EXPECT_EQ(Upsample(0.5)(x).shape(), (Shape{2, 3, 2, 2}));
  EXPECT_THAT(layer_refusal_of([&] { Upsample(0.1)(x); }), HasSubstr("positive size"));
  EXPECT_THAT(layer_refusal_of([&] {
                autograd::interpolate(x, {2, 2}, {autograd::ResampleMode::area, true});
              }),
              HasSubstr("bilinear"));
  EXPECT_THAT(layer_refusal_of([&] {
                autograd::avg_pool2d(x, {.output = {{2, 2}}});
              }),
              HasSubstr("resample2d"));
  EXPECT_THAT(layer_refusal_of([] { Upsample(0.0); }), HasSubstr("positive scale"));
}

// ---- Losses, order, products

const std::pair<const char*, Reduction> kLayerReductions[] = {
    {"none", Reduction::none}, {"mean", Reduction::mean}, {"sum", Reduction::sum}};

TEST(Similarity, IsPyTorchs) {
  torch_layers().compare("cosine_similarity",
                         [](const Tensor& a, const Tensor& b) { return cosine_similarity(a, b); });
  torch_layers().compare("cosine_similarity.0", [](const Tensor& a, const Tensor& b) {
    return cosine_similarity(a, b, 0);
  });
  for (const DType dtype : {DType::i64, DType::f32}) {
    const Tensor labels = Tensor::from<std::int64_t>({1, -1, 1, -1}, {4}, dtype);
    for (const auto& [name, reduction] : kLayerReductions) {
      torch_layers().compare(std::string("cosine_embedding_loss.") + name,
                             [&, r = reduction](const Tensor& a, const Tensor& b) {
                               return cosine_embedding_loss(a, b, labels, r, -0.5);
                             });
    }
  }
  const Tensor c = torch_layers().values().tensor("triplet_margin_loss.mean.c");
  for (const auto& [name, reduction] : kLayerReductions) {
    torch_layers().compare(std::string("triplet_margin_loss.") + name,
                           [&, r = reduction](const Tensor& a, const Tensor& b) {
                             return triplet_margin_loss(a, b, c, {.reduction = r, .margin = 2.0});
                           });
  }
  torch_layers().compare(
      "triplet_margin_loss.swap",
      [&](const Tensor& a, const Tensor& b) {
        return triplet_margin_loss(a, b, c, {.margin = 4.0, .p = 3.0, .swap = true});
      },
      1e-5);
}

TEST(Similarity, HasItsCentralDifferences) {
  const Tensor labels = Tensor::from<std::int64_t>({1, -1, -1}, {3});
  check_gradients([](const Tensors& x) { return cosine_similarity(x[0], x[1], -1); },
                  {leaf({3, 4}, 1), leaf({3, 4}, 2)});
  check_gradients(
      [&](const Tensors& x) {
        return cosine_embedding_loss(x[0], x[1], labels, Reduction::none, -1.0);
      },
      {leaf({3, 4}, 1), leaf({3, 4}, 2)});
  for (const double p : {2.0, 3.0}) {
    check_gradients(
        [p](const Tensors& x) {
          return triplet_margin_loss(x[0], x[1], x[2], {.margin = 3.0, .p = p});
        },
        {leaf({3, 4}, 1), leaf({3, 4}, 2), leaf({3, 4}, 3)});
  }
}

TEST(Similarity, OfZerosHasNoGradient) {
  const Tensor zero = Tensor::zeros({2, 3}).set_requires_grad(true);
  const Tensor x = random_tensor({2, 3}, 1, -1, 1, DType::f32);
  autograd::backward(autograd::sum(cosine_similarity(zero, zero)));
  EXPECT_THAT(zero.grad().to_vector(), ::testing::Each(0.0));
  Tensor(zero).clear_grad();
  autograd::backward(triplet_margin_loss(zero, zero, x, {.eps = 0.0}));
  for (const double g : zero.grad().to_vector()) EXPECT_TRUE(std::isfinite(g));
}

TEST(Similarity, LossesOfHalvesAreF32AndNamed) {
  const Tensor a = random_tensor({2, 3}, 1, -1, 1, DType::f16),
               b = random_tensor({2, 3}, 2, -1, 1, DType::f16);
  const Tensor labels = Tensor::from<std::int64_t>({1, -1}, {2});
  EXPECT_EQ(cosine_embedding_loss(a, b, labels).dtype(), DType::f32);
  EXPECT_EQ(triplet_margin_loss(a, b, a).dtype(), DType::f32);
  {
    const autograd::AutocastGuard autocast(true);
    EXPECT_EQ(cosine_similarity(a, b).dtype(), DType::f32);
    const autograd::CastPolicyGuard policies({{"cosine_similarity", autograd::CastPolicy::half}});
    EXPECT_EQ(cosine_similarity(a, b).dtype(), DType::f16);
  }
  EXPECT_THAT(layer_refusal_of([&] { cosine_embedding_loss(a, b, Tensor::zeros({3})); }),
              HasSubstr("[cosine_embedding_loss] expected a target [2]"));
  EXPECT_THAT(layer_refusal_of([&] { triplet_margin_loss(a, b, Tensor::zeros({3})); }),
              HasSubstr("[triplet_margin_loss]"));
}

TEST(Order, TopkAndCumsumArePyTorchs) {
  torch_layers().compare("topk", [](const Tensor& a, const Tensor&) {
    const autograd::TopK top = autograd::topk(a, 3);
    EXPECT_EQ(top.index.to_vector(), torch_layers().values().values("topk.index"));
    return top.values;
  });
  torch_layers().compare("topk.smallest", [](const Tensor& a, const Tensor&) {
    const autograd::TopK top = autograd::topk(a, 2, false);
    EXPECT_EQ(top.index.to_vector(), torch_layers().values().values("topk.smallest.index"));
    return top.values;
  });
  torch_layers().compare("cumsum",
                         [](const Tensor& a, const Tensor&) { return autograd::cumsum(a, -1); });
  torch_layers().compare("cumsum.0",
                         [](const Tensor& a, const Tensor&) { return autograd::cumsum(a, 0); });
}

TEST(Order, HasItsCentralDifferences) {
  check_gradients([](const Tensors& x) { return autograd::topk(x[0], 2).values; },
                  {leaf({2, 3, 5}, 1)});
  for (const int dim : {0, 1, -1}) {
    check_gradients([dim](const Tensors& x) { return autograd::cumsum(x[0], dim); },
                    {leaf({2, 3, 4}, 1)});
  }
}

TEST(Order, CumsumIsF32InARegionTopkKeeps) {
  const Tensor x = random_tensor({2, 6}, 1, -1, 1, DType::f16);
  const autograd::AutocastGuard autocast(true);
  EXPECT_EQ(autograd::cumsum(x, -1).dtype(), DType::f32);
  EXPECT_EQ(autograd::topk(x, 2).values.dtype(), DType::f16);
  EXPECT_THAT(layer_refusal_of([&] { autograd::topk(x, 7); }), HasSubstr("0..V"));
}

TEST(Order, ArgmaxTakesTheFirstOfEqualsAndOfNan) {
  const float nan = std::nanf("");
  const Tensor x = Tensor::from<float>({1, 3, 3, nan, 2, nan, -1, -1, -1}, {3, 3});
  EXPECT_THAT(autograd::argmax(x).to_vector(), ::testing::ElementsAre(1, 0, 0));
  EXPECT_THAT(autograd::argmin(x).to_vector(), ::testing::ElementsAre(0, 0, 0));
}

TEST(Bilinear, IsPyTorchs) {
  Bilinear layer(6, 6, 3);
  torch_layers().compare_module<Bilinear>(
      "bilinear", layer, [](Bilinear& m, const Tensor& a, const Tensor& b) { return m.run(a, b); });
  EXPECT_THAT(layer_refusal_of([&] { layer(Tensor::zeros({2, 6})); }), HasSubstr("run(a, b)"));
  EXPECT_THAT(layer_refusal_of([&] {
                layer.run(Tensor::zeros({2, 5}), Tensor::zeros({2, 6}));
              }),
              HasSubstr("[bilinear]"));
}

TEST(Bilinear, OfSeveralDimensionsPromotes) {
  Bilinear layer(3, 2, 4);
  const Tensor a = random_tensor({2, 5, 3}, 1, -1, 1, DType::f32),
               b = random_tensor({2, 5, 2}, 2, -1, 1, DType::f16);
  const autograd::AutocastGuard autocast(true);
  const Tensor y = layer.run(a, b);
  EXPECT_EQ(y.dtype(), DType::f32);
  EXPECT_EQ(y.shape(), (Shape{2, 5, 4}));
}

TEST(CtcLoss, IsPyTorchs) {
  const Tensor targets =
      Tensor::from<std::int64_t>({1, 2, 2, 1, 3, 4, 0, 0, 4, 4, 4, 4, 2, 0, 0, 0}, {4, 4});
  const Tensor inputs = Tensor::from<std::int64_t>({9, 5, 6, 4}, {4}),
               lengths = Tensor::from<std::int64_t>({4, 2, 4, 0}, {4});
  for (const auto& [name, reduction] : kLayerReductions) {
    torch_layers().compare(
        std::string("ctc_loss.") + name,
        [&, r = reduction](const Tensor& a, const Tensor&) {
          return ctc_loss(autograd::log_softmax(a), targets, inputs, lengths,
                          {.reduction = r, .zero_infinity = true});
        },
        1e-5);
  }
}

TEST(CtcLoss, HasItsCentralDifferences) {
  const Tensor targets = Tensor::from<std::int64_t>({0, 2, 2, 1, 0, 0}, {2, 3});
  const Tensor inputs = Tensor::from<std::int64_t>({6, 4}, {2}),
               lengths = Tensor::from<std::int64_t>({3, 1}, {2});
  check_gradients(
      [&](const Tensors& x) { return ctc_loss(x[0], targets, inputs, lengths, {.blank = 3}); },
      {leaf({6, 2, 4}, 1, -3, -1)});
}

TEST(CtcLoss, OfHalvesIsF32AndAnImpossibleTargetInfinite) {
  const Tensor x = random_tensor({2, 1, 3}, 1, -3, -1, DType::f16).set_requires_grad(true);
  const Tensor targets = Tensor::from<std::int64_t>({1, 1}, {1, 2});
  const Tensor two = Tensor::from<std::int64_t>({2}, {1});
  const Tensor loss = ctc_loss(x, targets, two, two, {.reduction = Reduction::sum});
  EXPECT_EQ(loss.dtype(), DType::f32);
  EXPECT_TRUE(std::isinf(loss.item()));
  const Tensor none = ctc_loss(x, targets, two, two, {.zero_infinity = true});
  EXPECT_EQ(none.item(), 0.0);
  autograd::backward(none);
  EXPECT_THAT(x.grad().to_vector(), ::testing::Each(0.0));
  if (core::default_device().is_cuda()) return;  // there the loss is NaN
  const Tensor beyond = Tensor::from<std::int64_t>({3}, {1});
  EXPECT_THAT(layer_refusal_of([&] { ctc_loss(x, targets, two, beyond); }),
              HasSubstr("[ctc_loss]"));
  EXPECT_THAT(layer_refusal_of([&] {
                ctc_loss(x, Tensor::full({1, 2}, 3, DType::i64), two, two);
              }),
              HasSubstr("classes in 0..2"));
}

// ---- Normalisations

TEST(BatchNorm1d, OfSequencesIsPyTorchs) {
  compare_layer("batch_norm1d", BatchNorm1d(6));
}

TEST(BatchNorm3d, IsPyTorchs) {
  compare_layer("batch_norm3d", BatchNorm3d(3));
}

TEST(BatchNorms, NameTheShapesTheyTake) {
  const Tensor x = random_tensor({2, 3, 4, 4}, 1, -1, 1, DType::f32);
  BatchNorm1d one(3);
  EXPECT_THAT(layer_refusal_of([&] { one(x); }), HasSubstr("expected x [N, 3] or [N, 3, L], got"));
  BatchNorm3d three(3);
  EXPECT_THAT(layer_refusal_of([&] { three(x); }), HasSubstr("expected x [N, 3, D, H, W], got"));
}

TEST(InstanceNorm, IsPyTorchs) {
  compare_layer("instance_norm", InstanceNorm(3, {.affine = true}));
  compare_layer("instance_norm_plain", InstanceNorm(6));
}

TEST(InstanceNorm, IsItselfAfterCloning) {
  const InstanceNorm norm(4);
  EXPECT_EQ(norm.clone()->kind(), "InstanceNorm");
  EXPECT_TRUE(norm.parameters().empty());
}

// ---- Attention and transformers

TEST(MultiheadAttention, ToAnotherTensorIsPyTorchs) {
  MultiheadAttention attention(8, 2, {.causal = false});
  // The value differs from the key: half of the memory backwards.
  torch_layers().compare_module<MultiheadAttention>(
      "cross_attention", attention, [](MultiheadAttention& m, const Tensor& q, const Tensor& k) {
        Tensors backwards;
        for (std::int64_t t = k.size(1) - 1; t >= 0; --t) {
          backwards.push_back(autograd::slice(k, 1, t, t + 1));
        }
        return m.run(q, k, autograd::concat(backwards, 1) * 0.5);
      });
}

TEST(MultiheadAttention, ToItselfIsTheSame) {
  for (const bool causal : {false, true}) {
    manual_seed(1);
    MultiheadAttention attention(8, 2, {.causal = causal});
    const Tensor x = random_tensor({2, 5, 8}, 1, -1, 1, DType::f32);
    autograd::testing::expect_close(attention.run(x, x, x), attention(x).to_vector(), 1e-5);
  }
}

TEST(MultiheadAttention, SharesHeadsOfKeys) {
  manual_seed(1);
  MultiheadAttention grouped(8, 4, {.causal = true, .kv_heads = 2}), each(8, 4);
  // The one's heads of keys and values, twice each, are the other's.
  const auto copy_heads = [](const Tensor& from, const Tensor& to) {
    for (std::int64_t head = 0; head < 12; ++head) {
      const std::int64_t part = head < 4 ? head : head / 2 + 2;
      kernels::copy(from.view().slice(0, 2 * part, 2 * part + 2),
                    to.view().slice(0, 2 * head, 2 * head + 2));
    }
  };
  const NamedTensors from = grouped.parameters(), to = each.parameters();
  EXPECT_EQ(from[0].name, "qkv.weight");
  EXPECT_EQ(from[0].tensor.shape(), Shape({16, 8}));
  EXPECT_EQ(from[1].tensor.shape(), Shape({16}));
  for (const std::size_t qkv : {0, 1}) copy_heads(from[qkv].tensor, to[qkv].tensor);
  for (const std::size_t out : {2, 3}) kernels::copy(from[out].tensor, to[out].tensor);
  const Tensor x = random_tensor({2, 5, 8}, 1, -1, 1, DType::f32);
  autograd::testing::expect_close(grouped(x), each(x).to_vector(), 1e-5);
  autograd::testing::expect_close(grouped.run(x, x, x), grouped(x).to_vector(), 1e-5);
  EXPECT_EQ(grouped.clone()->parameters()[0].tensor.shape(), Shape({16, 8}));
}

TEST(MultiheadAttention, NamesWhatDoesNotFit) {
  MultiheadAttention attention(8, 2);
  const Tensor x = random_tensor({2, 5, 8}, 1, -1, 1, DType::f32);
  const Tensor narrow = random_tensor({2, 5, 6}, 1, -1, 1, DType::f32);
  EXPECT_THAT(layer_refusal_of([&] { attention.run(x, narrow, narrow); }), HasSubstr("[B, S, 8]"));
  EXPECT_THAT(layer_refusal_of([&] { attention.run(x, autograd::slice(x, 0, 0, 1), x); }),
              HasSubstr("query [B, T, 8]"));
  for (const std::int64_t kv_heads : {-1, 3, 4}) {
    EXPECT_THAT(layer_refusal_of([&] { MultiheadAttention(8, 2, {.kv_heads = kv_heads}); }),
                HasSubstr("expected heads that are a multiple of kv_heads, got 2 and"));
  }
}

TEST(Transformer, LayersArePyTorchs) {
  for (const bool norm_first : {false, true}) {
    const std::string last = norm_first ? "pre" : "post";
    const TransformerOptions options{.feedforward = 12, .dropout = 0.0, .norm_first = norm_first};
    TransformerOptions with_gelu = options;
    with_gelu.activation = autograd::Activation::gelu;
    compare_layer("encoder_" + last, TransformerEncoderLayer(8, 2, with_gelu));
    TransformerDecoderLayer decoder(8, 2, options);
    torch_layers().compare_module<TransformerDecoderLayer>(
        "decoder_" + last, decoder,
        [](TransformerDecoderLayer& m, const Tensor& x, const Tensor& y) { return m.run(x, y); });
  }
}

TEST(Transformer, DropsInTrainingOnly) {
  manual_seed(1);
  TransformerEncoderLayer encoder(8, 2, {.feedforward = 16, .dropout = 0.5});
  TransformerDecoderLayer decoder(8, 2, {.feedforward = 16, .dropout = 0.5});
  const Tensor x = random_tensor({2, 5, 8}, 1, -1, 1, DType::f32);
  EXPECT_NE(encoder(x).to_vector(), encoder(x).to_vector());
  EXPECT_NE(decoder.run(x, x).to_vector(), decoder.run(x, x).to_vector());
  encoder.eval();
  decoder.eval();
  EXPECT_EQ(encoder(x).to_vector(), encoder(x).to_vector());
  EXPECT_EQ(decoder.run(x, x).to_vector(), decoder.run(x, x).to_vector());
}

/// What tokens give, and what they give to the parameters, is what sequences give that are alone.
TEST(Transformer, PaddedSequencesAreAsIfAlone) {
  const std::vector<std::int64_t> sizes = {5, 2, 4};
  const Tensor lengths = Tensor::from(sizes, {3});
  const auto sequence = [](const Tensor& x, std::int64_t b, std::int64_t n) {
    return autograd::slice(autograd::slice(x, 0, b, b + 1), 1, 0, n);
  };
  for (const bool norm_first : {false, true}) {
    manual_seed(3);
    const TransformerOptions options{.feedforward = 16, .dropout = 0.0, .norm_first = norm_first};
    TransformerEncoderLayer encoder(8, 2, options);
    TransformerDecoderLayer decoder(8, 2, options);
    const Tensor source = random_tensor({3, 5, 8}, 1, -1, 1, DType::f32);
    const Tensor target = random_tensor({3, 6, 8}, 2, -1, 1, DType::f32);
    const auto gradients_of = [&](const Tensor& sum) {
      autograd::backward(sum);
      std::vector<std::vector<double>> result;
      for (const auto& parameter : encoder.parameters()) {
        Tensor tensor = parameter.tensor;
        result.push_back(tensor.grad().to_vector());
        tensor.clear_grad();
      }
      return result;
    };
    Tensor alone;
    const Tensor memory = encoder.run(source, lengths);
    const Tensor y = decoder.run(target, memory, lengths);
    for (std::int64_t b = 0; b < 3; ++b) {
      const std::int64_t n = sizes[static_cast<std::size_t>(b)];
      const Tensor own = encoder(sequence(source, b, n)), x = sequence(target, b, 6);
      const Tensor own_y = decoder.run(x, own);
      autograd::testing::expect_close(sequence(memory, b, n), own.to_vector(), 1e-5);
      autograd::testing::expect_close(sequence(y, b, 6), own_y.to_vector(), 1e-5);
      const Tensor sum = autograd::sum(own_y * own_y);
      alone = alone.defined() ? alone + sum : sum;
    }
    const auto expected = gradients_of(alone), got = gradients_of(autograd::sum(y * y));
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      for (std::size_t k = 0; k < got[i].size(); ++k) {
        ASSERT_NEAR(got[i][k], expected[i][k], 2e-4) << encoder.parameters()[i].name << " " << k;
      }
    }
  }
}

TEST(Transformer, ADecoderSeesNoLaterTokenAnEncoderAll) {
  manual_seed(1);
  TransformerEncoderLayer encoder(8, 2, {.feedforward = 16, .dropout = 0.0}),
      masked(8, 2, {.feedforward = 16, .dropout = 0.0, .causal = true});
  TransformerDecoderLayer decoder(8, 2, {.feedforward = 16, .dropout = 0.0});
  const Tensor x = random_tensor({1, 4, 8}, 1, -1, 1, DType::f32);
  const Tensor other = autograd::concat(
      {autograd::slice(x, 1, 0, 3), random_tensor({1, 1, 8}, 2, -1, 1, DType::f32)}, 1);
  const auto first = [](const Tensor& y) { return autograd::slice(y, 1, 0, 3).to_vector(); };
  EXPECT_NE(first(encoder(x)), first(encoder(other)));
  EXPECT_EQ(first(masked(x)), first(masked(other)));
  EXPECT_EQ(first(decoder.run(x, x)), first(decoder.run(other, x)));
  EXPECT_THAT(layer_refusal_of([&] { decoder(x); }), HasSubstr("run(x, memory)"));
}

}  // namespace
}  // namespace cairn::nn
