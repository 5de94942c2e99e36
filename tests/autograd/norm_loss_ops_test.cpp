#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/autograd/ops.h"
#include "gradient_check.h"
#include "support/cpu_only.h"

namespace cairn::autograd {
namespace {

using testing::check_gradients;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;
using testing::strided_leaf;

TEST(LayerNorm, HasTheGradientsOfItsFormula) {
  const auto f = [](const Tensors& x) { return layer_norm(x[0], x[1], x[2]); };
  check_gradients(f, {leaf({3, 7}, 1), leaf({7}, 2), leaf({7}, 3)});
  check_gradients(f, {leaf({2, 3, 5}, 1), leaf({5}, 2), Tensor()});
  check_gradients(f, {strided_leaf({3, 7}, 1), Tensor(), Tensor()});
  check_gradients(f, {random_tensor({3, 7}, 1), leaf({7}, 2), leaf({7}, 3)});
  check_gradients(f, {leaf({0, 7}, 1), leaf({7}, 2), leaf({7}, 3)});
}

TEST(LayerNorm, AddsToGradientsThatAreThere) {
  const Tensor x = random_tensor({4, 5}, 1), w = leaf({5}, 2), b = leaf({5}, 3);
  backward(sum(layer_norm(x, w, b)));
  std::vector<double> dw = w.grad().to_vector();
  b.gradient_slot().clear();  // the bias starts again, the weight adds
  backward(sum(layer_norm(x, w, b)));
  for (double& v : dw) v *= 2;
  expect_close(w.grad(), dw, 1e-12);
  expect_close(b.grad(), {4, 4, 4, 4, 4}, 1e-12);
}

TEST(RmsNorm, HasTheGradientsOfItsFormula) {
  const auto f = [](const Tensors& x) { return rms_norm(x[0], x[1]); };
  check_gradients(f, {leaf({3, 7}, 1), leaf({7}, 2)});
  check_gradients(f, {leaf({2, 3, 5}, 1), leaf({5}, 2)});
  check_gradients(f, {leaf({3, 7}, 1), Tensor()});
}

// By the definition.
Tensor group_norm_reference(const Tensor& x, std::int64_t groups, const Tensor& w, const Tensor& b,
                            double eps) {
  const Tensor rows = reshape(x, {x.size(0), groups, -1});
  const Tensor centred = rows - mean(rows, {2}, true);
  const Tensor normal = centred / sqrt(mean(centred * centred, {2}, true) + eps);
  Shape channels = Shape::filled(x.dims(), 1);
  channels[1] = x.size(1);
  return reshape(normal, x.shape()) * reshape(w, channels) + reshape(b, channels);
}

TEST(GroupNorm, IsItsDefinitionWithItsGradients) {
  for (const Shape& shape : {Shape{3, 6}, Shape{2, 6, 5}, Shape{2, 6, 3, 2}}) {
    for (const std::int64_t groups : {1, 2, 3}) {
      const Tensor x = leaf(shape, 1), w = leaf({6}, 2), b = leaf({6}, 3);
      const auto f = [=](const Tensors& in) { return group_norm(in[0], groups, in[1], in[2]); };
      expect_close(f({x, w, b}), group_norm_reference(x, groups, w, b, 1e-5).to_vector(), 1e-12);
      check_gradients(f, {x, w, b});
      check_gradients(f, {x, Tensor(), Tensor()});
      check_gradients(f, {x.detach(), w, Tensor()});
    }
  }
  const auto f = [](const Tensors& in) { return group_norm(in[0], 2, in[1], in[2]); };
  check_gradients(f, {strided_leaf({2, 4, 3}, 1), leaf({4}, 2), leaf({4}, 3)});
  check_gradients(f, {leaf({0, 4, 3}, 1), leaf({4}, 2), leaf({4}, 3)});
}

TEST(GroupNorm, KeepsChannelsLast) {
  const Tensor x = random_tensor({2, 4, 3, 3}, 1), w = leaf({4}, 2), b = leaf({4}, 3);
  const Tensor y = group_norm(channels_last(x), 2, w, b);
  EXPECT_TRUE(y.view().is_channels_last());
  expect_close(y, group_norm(x, 2, w, b).to_vector(), 0);
}

TEST(GroupNorm, NamesWhatDoesNotFit) {
  const Tensor x = random_tensor({2, 4, 3}, 1);
  EXPECT_THAT(error_of([&] { group_norm(x, 3, {}, {}); }), HasSubstr("multiple of 3"));
  EXPECT_THAT(error_of([&] { group_norm(x, 2, random_tensor({3}, 1), {}); }), HasSubstr("[4]"));
}

// By the definition, for any gradient check in f64 (the kernel keeps f32 statistics).
Tensor batch_norm_reference(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  const std::vector<int> dims = x.dims() == 4 ? std::vector<int>{0, 2, 3} : std::vector<int>{0};
  const Tensor centred = x - mean(x, dims, true);
  const Tensor normal = centred / sqrt(mean(centred * centred, dims, true) + eps);
  Shape channels = Shape::filled(x.dims(), 1);
  channels[1] = x.size(1);
  return normal * reshape(w, channels) + reshape(b, channels);
}

TEST(BatchNorm, IsItsDefinitionWithItsGradients) {
  for (const Shape& shape : {Shape{6, 3}, Shape{2, 3, 4, 5}}) {
    for (const bool fused : {false, true}) {
      const Tensor x = leaf(shape, 1, -1, 1, DType::f32), w = leaf({3}, 2, 0.5, 1, DType::f32),
                   b = leaf({3}, 3, -0.2, 0.2, DType::f32);
      const Tensor dy = random_tensor(shape, 4, -1, 1, DType::f32);
      Tensor expected = batch_norm_reference(x, w, b, 1e-5);
      if (fused) expected = relu(expected);
      backward(expected, dy);
      std::vector<std::vector<double>> gradients;
      for (Tensor t : {x, w, b}) {
        gradients.push_back(t.grad().to_vector());
        t.clear_grad();
      }
      const Tensor image = shape.dims() == 4 ? channels_last(x) : x;
      const Tensor y = batch_norm(image, w, b, {}, {}, {.relu = fused});
      expect_close(y, expected.to_vector(), 1e-5);
      backward(y, dy);
      expect_close(x.grad(), gradients[0], 1e-4);
      expect_close(w.grad(), gradients[1], 1e-5);
      expect_close(b.grad(), gradients[2], 1e-5);
    }
  }
}

TEST(BatchNorm, KeepsRunningStatisticsInTrainingOnly) {
  const Tensor x = random_tensor({8, 2}, 1, 1, 3, DType::f32);
  const Tensor running_mean = Tensor::zeros({2}), running_var = Tensor::full({2}, 1.0);
  const std::uint64_t version = running_mean.storage()->version();
  batch_norm(x, {}, {}, running_mean, running_var, {.momentum = 0.25});
  EXPECT_GT(running_mean.storage()->version(), version);
  const std::vector<double> v = x.to_vector();
  std::vector<double> means, vars;
  for (std::size_t c = 0; c < 2; ++c) {
    double total = 0, squares = 0;
    for (std::size_t n = 0; n < 8; ++n) total += v[n * 2 + c];
    for (std::size_t n = 0; n < 8; ++n) squares += std::pow(v[n * 2 + c] - total / 8, 2);
    means.push_back(0.25 * total / 8);
    vars.push_back(0.75 + 0.25 * squares / 7);  // unbiased
  }
  expect_close(running_mean, means, 1e-6);
  expect_close(running_var, vars, 1e-6);
  batch_norm(x, {}, {}, running_mean, running_var, {.training = false});
  ThreadState replay = ThreadState::capture();
  replay.recomputing = true;
  {
    const ThreadStateGuard guard(replay);
    batch_norm(x, {}, {}, running_mean, running_var, {});
  }
  expect_close(running_mean, means, 1e-6);
  expect_close(running_var, vars, 1e-6);
}

TEST(BatchNorm, EvaluationTreatsStatisticsAsConstants) {
  const Tensor running_mean = random_tensor({3}, 5, -1, 1, DType::f32);
  const Tensor running_var = random_tensor({3}, 6, 0.5, 2, DType::f32);
  const Tensor x = leaf({4, 3}, 1, -1, 1, DType::f32), w = leaf({3}, 2, -1, 1, DType::f32),
               b = leaf({3}, 3, -1, 1, DType::f32);
  const auto f = [&](const Tensors& in) {
    return batch_norm(in[0], in[1], in[2], running_mean, running_var,
                      {.training = false, .eps = 0.25});
  };
  check_gradients(f, {x, w, b}, {.step = 0.5, .tolerance = 2e-5});  // linear in each input
}

TEST(BatchNorm, NamesWhatDoesNotFit) {
  const Tensor x = random_tensor({1, 3}, 1, -1, 1, DType::f32);
  EXPECT_THAT(error_of([&] { batch_norm(x, {}, {}, {}, {}); }), HasSubstr("more than one value"));
  EXPECT_THAT(error_of([&] { batch_norm(x, {}, {}, {}, {}, {.training = false}); }),
              HasSubstr("running statistics"));
  EXPECT_THAT(error_of([&] { batch_norm(x, {}, {}, Tensor::zeros({3}), {}); }), HasSubstr("both"));
  EXPECT_THAT(error_of([] {
                batch_norm(Tensor::zeros({2, 3, 4}), {}, {}, {}, {});
              }),
              HasSubstr("[2, 3, 4]"));
}

TEST(Softmax, HasTheGradientsOfItsFormula) {
  check_gradients([](const Tensors& x) { return softmax(x[0]); }, {leaf({3, 5}, 1)});
  check_gradients([](const Tensors& x) { return softmax(x[0], {.scale = 0.5}); },
                  {strided_leaf({3, 5}, 1)});
  check_gradients([](const Tensors& x) { return softmax(x[0], {.causal = true}); },
                  {leaf({2, 4, 4}, 1)});
  check_gradients([](const Tensors& x) { return log_softmax(x[0]); }, {leaf({2, 3, 5}, 1)});
  check_gradients([](const Tensors& x) { return log_softmax(x[0]); }, {leaf({0, 5}, 1)});
}

// Cross entropy from its definition, with ops that are checked on their own.
Tensor cross_entropy_reference(const Tensor& logits, const Tensor& target,
                               const CrossEntropyOptions& options) {
  const std::int64_t N = logits.size(0), V = logits.size(1);
  std::vector<double> weights(static_cast<std::size_t>(N * V), 0.0);
  const std::vector<std::int64_t> classes = target.to_vector<std::int64_t>();
  double count = 0;
  for (std::int64_t n = 0; n < N; ++n) {
    const std::int64_t label = classes[static_cast<std::size_t>(n)];
    if (label == options.ignore_index) continue;
    ++count;
    for (std::int64_t v = 0; v < V; ++v) {
      weights[static_cast<std::size_t>(n * V + v)] =
          options.label_smoothing / static_cast<double>(V) +
          (v == label ? 1.0 - options.label_smoothing : 0.0);
    }
  }
  const Tensor loss =
      sum(log_softmax(logits) * Tensor::from(weights, {N, V}, DType::f64), {1}) * -1.0;
  if (options.reduction == Reduction::none) return loss;
  return options.reduction == Reduction::sum ? sum(loss) : sum(loss) / count;
}

TEST(CrossEntropy, IsItsDefinitionWithItsGradients) {
  const Tensor target = Tensor::from(std::vector<std::int64_t>{2, -100, 0, 4}, {4});
  for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
    for (const double smoothing : {0.0, 0.2}) {
      const CrossEntropyOptions options{.reduction = reduction, .label_smoothing = smoothing};
      const Tensor logits = leaf({4, 5}, 1);
      const auto f = [&](const Tensors& x) { return cross_entropy(x[0], target, options); };
      expect_close(f({logits}), cross_entropy_reference(logits, target, options).to_vector(),
                   1e-12);
      check_gradients(f, {logits});
      check_gradients(f, {strided_leaf({4, 5}, 1)});
    }
  }
}

TEST(CrossEntropy, TakesAnyLeadingDimensionsAndItsOwnIgnoredIndex) {
  const Tensor target = Tensor::from(std::vector<std::int64_t>{2, 0, 1, 4, 3, 0}, {2, 3});
  const CrossEntropyOptions options{.reduction = Reduction::none, .ignore_index = 0};
  const Tensor loss = cross_entropy(leaf({2, 3, 5}, 1), target, options);
  EXPECT_EQ(loss.shape(), (Shape{2, 3}));
  EXPECT_EQ(loss.to_vector()[1], 0.0);
  check_gradients(
      [&](const Tensors& x) { return cross_entropy(x[0], target, {.ignore_index = 0}); },
      {leaf({2, 3, 5}, 1)});
}

TEST(CrossEntropy, TakesTargetsThatAreNotContiguous) {
  const Tensor stored = Tensor::from<std::int64_t>({0, 1, 2, 3, 4, 2}, {2, 3});
  const Tensor turned = stored.alias(stored.view().transpose(0, 1));
  const Tensor logits = random_tensor({3, 2, 5}, 1);
  EXPECT_EQ(
      cross_entropy(logits, turned).to_vector(),
      cross_entropy(logits, Tensor::from(turned.to_vector(), {3, 2}, DType::i64)).to_vector());
}

TEST(CrossEntropy, GivesAnF32LossForHalfLogits) {
  const Tensor target = Tensor::from(std::vector<std::int64_t>{2, 0}, {2});
  const Tensor logits = leaf({2, 5}, 1, -1, 1, DType::f16);
  const Tensor loss = cross_entropy(logits, target);
  EXPECT_EQ(loss.dtype(), DType::f32);
  backward(loss);
  EXPECT_EQ(logits.grad().dtype(), DType::f16);
  const Tensor wide = to(logits.detach(), DType::f64);
  expect_close(loss, cross_entropy_reference(wide, target, {}).to_vector(), 1e-6);
}

TEST(CrossEntropy, AllIgnoredIsNaNAsAMeanAndZeroAsASum) {
  const Tensor target = Tensor::full({2}, -100, DType::i64);
  const Tensor logits = random_tensor({2, 5}, 1, -1, 1, DType::f32);
  EXPECT_TRUE(std::isnan(cross_entropy(logits, target).item()));
  EXPECT_EQ(cross_entropy(logits, target, {.reduction = Reduction::sum}).item(), 0.0);
}

TEST(CrossEntropy, NamesWrongTargets) {
  CAIRN_CPU_ONLY("a GPU would have to be waited for");
  const Tensor logits = random_tensor({2, 5}, 1, -1, 1, DType::f32);
  const auto with = [&](std::vector<std::int64_t> classes) {
    const auto n = static_cast<std::int64_t>(classes.size());
    return error_of([&] { cross_entropy(logits, Tensor::from(classes, {n})); });
  };
  EXPECT_THAT(with({0, 5}), HasSubstr("5"));
  EXPECT_THAT(with({0, 1, 2}), HasSubstr("[3]"));
  EXPECT_THAT(error_of([&] { cross_entropy(logits, Tensor::zeros({2}, DType::i32)); }),
              HasSubstr("i32"));
}

TEST(Mse, HasTheGradientsOfItsFormula) {
  for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
    const auto f = [=](const Tensors& x) { return mse_loss(x[0], x[1], reduction); };
    check_gradients(f, {leaf({3, 4}, 1), leaf({3, 4}, 2)});
    check_gradients(f, {strided_leaf({3, 4}, 1), random_tensor({3, 4}, 2)});
  }
  const Tensor a = Tensor::from(std::vector<float>{1, 2}, {2}), b = Tensor::zeros({2});
  EXPECT_NEAR(mse_loss(a, b).item(), 2.5, 1e-6);
  EXPECT_THAT(error_of([&] { mse_loss(a, Tensor::zeros({3})); }), HasSubstr("[3]"));
}

TEST(BceWithLogits, HasTheGradientsOfItsFormula) {
  for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
    const auto f = [=](const Tensors& x) { return bce_with_logits(x[0], x[1], reduction); };
    check_gradients(f, {leaf({3, 4}, 1, -3, 3), leaf({3, 4}, 2, 0, 1)});
  }
  const Tensor x = Tensor::from(std::vector<float>{100, -100}, {2});
  const Tensor t = Tensor::from(std::vector<float>{1, 1}, {2});
  EXPECT_NEAR(bce_with_logits(x, t, Reduction::sum).item(), 100.0, 1e-4);
}

TEST(BinaryCrossEntropy, IsItsDefinitionWithItsGradients) {
  const Tensor p = leaf({3, 4}, 1, 0.05, 0.95), t = leaf({3, 4}, 2, 0, 1);
  const Tensor one = Tensor::full({}, 1.0, DType::f64);
  const Tensor expected = -(t * log(p) + (one - t) * log(one - p));
  expect_close(binary_cross_entropy(p, t, Reduction::none), expected.to_vector(), 1e-13);
  EXPECT_NEAR(binary_cross_entropy(p, t).item(), mean(expected).item(), 1e-14);
  for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
    const auto f = [=](const Tensors& x) { return binary_cross_entropy(x[0], x[1], reduction); };
    check_gradients(f, {p, t});
  }
}

TEST(BinaryCrossEntropy, IsThatOfTheLogits) {
  const Tensor x = random_tensor({64}, 1, -9, 9, DType::f32),
               t = random_tensor({64}, 2, 0, 1, DType::f32);
  expect_close(binary_cross_entropy(sigmoid(x), t, Reduction::none),
               bce_with_logits(x, t, Reduction::none).to_vector(), 2e-4);
}

TEST(KlDiv, OfAProbabilityOfZeroIsZeroThere) {
  const Tensor x = log(Tensor::from(std::vector<double>{0.25, 0.75}, {2}));
  const Tensor target = Tensor::from(std::vector<double>{0, 1}, {2});
  expect_close(kl_div(x, target, Reduction::none), {0, -std::log(0.75)}, 1e-12);
}

TEST(Losses, OfHalfResultsBesideF32TargetsAreF32) {
  const Tensor x = Tensor::full({1}, 1.0, DType::f16), target = Tensor::full({1}, 1.0 + 0x1p-12);
  EXPECT_EQ(mse_loss(x, target).item(), 0x1p-24);  // in f16 the two are one number
}

TEST(Losses, TheMeanOverNoSampleIsAnErrorAndTheSumIsZero) {
  const Tensor x = leaf({0, 3}, 1), weight = leaf({5, 3}, 2);
  const Tensor none = Tensor::zeros({0}, DType::i64);
  using Loss = std::function<Tensor(Reduction)>;
  const std::vector<std::pair<std::string, Loss>> losses = {
      {"cross_entropy", [&](Reduction r) { return cross_entropy(x, none, {.reduction = r}); }},
      {"linear_cross_entropy",
       [&](Reduction r) { return linear_cross_entropy(x, weight, {}, none, {.reduction = r}); }},
      {"nll_loss", [&](Reduction r) { return nll_loss(x, none, {.reduction = r}); }},
      {"mse_loss", [&](Reduction r) { return mse_loss(x, x, r); }},
      {"l1_loss", [&](Reduction r) { return l1_loss(x, x, r); }},
      {"smooth_l1_loss", [&](Reduction r) { return smooth_l1_loss(x, x, r); }},
      {"huber_loss", [&](Reduction r) { return huber_loss(x, x, r); }},
      {"kl_div", [&](Reduction r) { return kl_div(x, x, r); }},
      {"bce_with_logits", [&](Reduction r) { return bce_with_logits(x, x, r); }},
      {"binary_cross_entropy", [&](Reduction r) { return binary_cross_entropy(x, x, r); }},
      {"cosine_embedding_loss",
       [&](Reduction r) { return cosine_embedding_loss(x, x, Tensor::zeros({0}, DType::f64), r); }},
      {"triplet_margin_loss",
       [&](Reduction r) { return triplet_margin_loss(x, x, x, {.reduction = r}); }}};
  for (const auto& [name, loss] : losses) {
    const std::string message = error_of<core::InvalidArgument>([&] { loss(Reduction::mean); });
    EXPECT_THAT(message,
                HasSubstr("[" + name + "] expected a mean over at least one sample, got none"));
    EXPECT_THAT(message, HasSubstr("skip an empty batch"));
    EXPECT_EQ(loss(Reduction::sum).item(), 0.0) << name;
  }
}

}  // namespace
}  // namespace cairn::autograd
