// Losses and small operations against PyTorch's values and gradients (tests/golden/make_losses.py),
// and against central differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "autograd/gradient_check.h"
#include "cairn/nn/nn.h"
#include "torch_cases.h"

namespace cairn::nn {
namespace {

using autograd::testing::check_gradients;
using autograd::testing::leaf;
using autograd::testing::random_tensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class F>
std::string refusal_of(F&& f) {
  return autograd::testing::error_of(std::forward<F>(f));
}

const TorchCases& torch_values() {
  static const TorchCases cases("losses");
  return cases;
}

void compare_with_torch(const std::string& name, const OfTwo& f) {
  torch_values().compare(name, f);
}

struct LossCase {
  const char* name;
  Tensor (*loss)(const Tensor& a, const Tensor& b, Reduction reduction);
};

const LossCase kLosses[] = {
    {"l1_loss", l1_loss},
    {"smooth_l1_loss",
     [](const Tensor& a, const Tensor& b, Reduction r) { return smooth_l1_loss(a, b, r, 0.7); }},
    {"huber_loss",
     [](const Tensor& a, const Tensor& b, Reduction r) { return huber_loss(a, b, r, 0.7); }},
    {"kl_div", [](const Tensor& a, const Tensor& b, Reduction r) { return kl_div(a, b, r); }},
    {"kl_div_log",
     [](const Tensor& a, const Tensor& b, Reduction r) { return kl_div(a, b, r, true); }},
};
const std::pair<const char*, Reduction> kReductions[] = {
    {"none", Reduction::none}, {"mean", Reduction::mean}, {"sum", Reduction::sum}};

TEST(TorchValues, LossesArePyTorchs) {
  for (const LossCase& c : kLosses) {
    for (const auto& [reduced, reduction] : kReductions) {
      compare_with_torch(std::string(c.name) + "." + reduced,
                         [&](const Tensor& a, const Tensor& b) { return c.loss(a, b, reduction); });
    }
  }
}

TEST(TorchValues, LossesHaveTheirCentralDifferences) {
  for (const LossCase& c : kLosses) {
    const bool probabilities = std::string(c.name) == "kl_div";
    const Tensor target = probabilities ? leaf({3, 4}, 2, 0.1, 0.9) : leaf({3, 4}, 2, -2.0, 2.0);
    for (const auto& [reduced, reduction] : kReductions) {
      check_gradients([&](const autograd::Tensors& x) { return c.loss(x[0], x[1], reduction); },
                      {leaf({3, 4}, 1, -2.0, 2.0), target});
    }
  }
}

TEST(TorchValues, LossesOfHalvesAreTakenInF32) {
  for (const LossCase& c : kLosses) {
    const std::string name = std::string(c.name) + ".mean";
    const Tensor a =
        autograd::to(torch_values().values().tensor(name + ".a"), DType::bf16).detach();
    const Tensor b =
        autograd::to(torch_values().values().tensor(name + ".b"), DType::bf16).detach();
    Tensor loss = c.loss(Tensor(a).set_requires_grad(true), b, Reduction::mean);
    EXPECT_EQ(loss.dtype(), DType::f32);
    const Tensor wide =
        c.loss(autograd::to(a, DType::f32), autograd::to(b, DType::f32), Reduction::mean);
    EXPECT_NEAR(loss.item(), wide.item(), 1e-6) << c.name;
    autograd::backward(loss);
    EXPECT_EQ(a.grad().dtype(), DType::bf16);
  }
}

TEST(TorchValues, NllLossIsPyTorchs) {
  const Tensor labels = torch_values().values().tensor("nll_loss.mean.index", DType::i64);
  for (const auto& [reduced, reduction] : kReductions) {
    compare_with_torch(std::string("nll_loss.") + reduced, [&](const Tensor& a, const Tensor&) {
      return nll_loss(a, labels, {.reduction = reduction});
    });
  }
  const Tensor x = leaf({2, 3, 5}, 1);
  const Tensor target = Tensor::from<std::int64_t>({0, 4, 7, 2, 2, 1}, {2, 3});
  check_gradients(
      [&](const autograd::Tensors& in) { return nll_loss(in[0], target, {.ignore_index = 7}); },
      {x});
  EXPECT_NEAR(nll_loss(autograd::log_softmax(x), target, {.ignore_index = 7}).item(),
              cross_entropy(x, target, {.ignore_index = 7}).item(), 1e-6);
  EXPECT_THAT(refusal_of([&] { nll_loss(x, Tensor::zeros({2}, DType::i64)); }),
              HasSubstr("nll_loss"));
}

TEST(TorchValues, SmallOperationsArePyTorchs) {
  compare_with_torch("clamp",
                     [](const Tensor& a, const Tensor&) { return autograd::clamp(a, -1, 0.5); });
  compare_with_torch("abs", [](const Tensor& a, const Tensor&) { return autograd::abs(a); });
  compare_with_torch("rsqrt", [](const Tensor& a, const Tensor&) { return autograd::rsqrt(a); });
  compare_with_torch("square", [](const Tensor& a, const Tensor&) { return autograd::square(a); });
  compare_with_torch("minimum", autograd::minimum);
  compare_with_torch("add_relu", autograd::add_relu);
  compare_with_torch("where", [](const Tensor& a, const Tensor& b) {
    return autograd::where(autograd::gt(a, b), a, b * b);
  });
  compare_with_torch("select",
                     [](const Tensor& a, const Tensor&) { return autograd::select(a, 1, 2); });
  const Tensor places = torch_values().values().tensor("gather.index", DType::i64);
  compare_with_torch("gather",
                     [&](const Tensor& a, const Tensor&) { return autograd::gather(a, places); });
  compare_with_torch("group_norm", [](const Tensor& a, const Tensor& b) {
    return autograd::group_norm(a, 2, b, b * 0.5);
  });
}

TEST(SmallOperations, HaveTheirCentralDifferences) {
  const Tensor condition = autograd::gt(random_tensor({3, 4}, 5), random_tensor({3, 4}, 6));
  check_gradients(
      [&](const autograd::Tensors& x) { return autograd::where(condition, x[0], x[1]); },
      {leaf({3, 4}, 1), leaf({4}, 2)});
  check_gradients([](const autograd::Tensors& x) { return autograd::clamp(x[0], -0.5, 0.5); },
                  {leaf({3, 4}, 1)});
  check_gradients([](const autograd::Tensors& x) { return autograd::neg(x[0]); },
                  {leaf({3, 4}, 1)});
  const Tensor index = Tensor::from<std::int64_t>({3, 0, 3, 1, 1, 1, 0, 2}, {2, 2, 2});
  check_gradients([&](const autograd::Tensors& x) { return autograd::gather(x[0], index); },
                  {leaf({2, 2, 4}, 1)});
  check_gradients([](const autograd::Tensors& x) { return autograd::select(x[0], -2, 1); },
                  {leaf({2, 3, 4}, 1)});
}

TEST(SmallOperations, WhatWhereDoesNotTakeMayBeAnything) {
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor a = Tensor::from<float>({1, inf, std::nanf("")}, {3}).set_requires_grad(true);
  const Tensor b = Tensor::from<float>({inf, 2, 3}, {3}).set_requires_grad(true);
  const Tensor y = autograd::where(
      autograd::lt(Tensor::from<float>({0, 9, 9}, {3}), Tensor::from<float>({1, 1, 1}, {3})), a, b);
  EXPECT_THAT(y.to_vector(), ElementsAre(1, 2, 3));
  autograd::backward(autograd::sum(y));
  EXPECT_THAT(a.grad().to_vector(), ElementsAre(1, 0, 0));
  EXPECT_THAT(b.grad().to_vector(), ElementsAre(0, 1, 1));
  EXPECT_THAT(refusal_of([&] { autograd::where(a, a, b); }), HasSubstr("boolean"));
}

TEST(SmallOperations, ComparisonsAndPlaces) {
  const Tensor a = Tensor::from<float>({1, 2, 3, 2}, {4}),
               b = Tensor::from<float>({2, 2, 2, 9}, {4});
  EXPECT_THAT(autograd::eq(a, b).to_vector(), ElementsAre(0, 1, 0, 0));
  EXPECT_THAT(autograd::ne(a, b).to_vector(), ElementsAre(1, 0, 1, 1));
  EXPECT_THAT(autograd::lt(a, b).to_vector(), ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(autograd::le(a, b).to_vector(), ElementsAre(1, 1, 0, 1));
  EXPECT_THAT(autograd::gt(a, b).to_vector(), ElementsAre(0, 0, 1, 0));
  EXPECT_THAT(autograd::ge(a, b).to_vector(), ElementsAre(0, 1, 1, 0));
  EXPECT_EQ(autograd::argmin(b).item(), 0);
  EXPECT_EQ(autograd::argmin(a).item(), 0);
}

TEST(SmallOperations, NameWhatDoesNotFit) {
  const Tensor x = random_tensor({2, 3}, 1);
  EXPECT_THAT(refusal_of([&] { autograd::select(x, 1, 3); }), HasSubstr("0..2 of dimension 1"));
  EXPECT_THAT(refusal_of([&] { autograd::clamp(x, 1, 0); }), HasSubstr("low <= high"));
  EXPECT_THAT(refusal_of([&] { autograd::gather(x, x); }), HasSubstr("i64"));
  EXPECT_THAT(refusal_of([&] { smooth_l1_loss(x, x, Reduction::mean, 0.0); }),
              HasSubstr("l1_loss"));
  if (core::default_device().is_cuda()) return;  // there the element is NaN
  for (const std::int64_t wrong : {-1, 3}) {
    const Tensor index = Tensor::from<std::int64_t>({0, wrong}, {2, 1});
    EXPECT_NE(refusal_of([&] { autograd::gather(x, index); }), "") << wrong;
  }
}

TEST(GroupNormModule, IsTheOperationAndClones) {
  GroupNorm norm(2, 4);
  const Tensor x = random_tensor({3, 4, 5}, 1, -1, 1, DType::f32);
  const Tensor expected = autograd::group_norm(x, 2, norm.weight(), norm.bias());
  EXPECT_EQ(norm(x).to_vector(), expected.to_vector());
  EXPECT_EQ((*norm.clone())(x).to_vector(), expected.to_vector());
  EXPECT_TRUE(GroupNorm(2, 4, {.affine = false}).parameters().empty());
  EXPECT_THAT(refusal_of([] { GroupNorm(3, 4); }), HasSubstr("multiple of the groups"));
  EXPECT_THAT(refusal_of([&] { norm(random_tensor({3, 5}, 1)); }), HasSubstr("[N, 4, ...]"));
}

TEST(Init, KaimingNormalHasItsDeviation) {
  const Tensor weight = Tensor::empty({200, 50});
  manual_seed(1);
  init::kaiming_normal(weight);
  double squares = 0.0;
  for (const double w : weight.to_vector()) squares += w * w;
  EXPECT_NEAR(squares / 10000, 2.0 / 50, 0.002);
}

TEST(Init, OrthogonalRowsOrColumns) {
  manual_seed(1);
  for (const Shape& shape : {Shape{4, 6}, Shape{6, 4}, Shape{5, 5}, Shape{3, 2, 2, 2}}) {
    const Tensor weight = Tensor::empty(shape);
    init::orthogonal(weight, 2.0);
    const std::int64_t columns = weight.numel() / shape[0], small = std::min(shape[0], columns);
    const Tensor matrix = autograd::reshape(weight, {shape[0], columns});
    const Tensor turned = autograd::transpose(matrix, 0, 1);
    const std::vector<double> product =
        (shape[0] <= columns ? autograd::matmul(matrix, turned) : autograd::matmul(turned, matrix))
            .to_vector();
    for (std::int64_t i = 0; i < small * small; ++i) {
      EXPECT_NEAR(product[static_cast<std::size_t>(i)], i % (small + 1) == 0 ? 4.0 : 0.0, 1e-5);
    }
  }
}

TEST(Recurrent, BatchFirstIsTheTransposed) {
  manual_seed(3);
  GRU one(5, 4, {.layers = 2, .bidirectional = true});
  GRU other(5, 4, {.layers = 2, .bidirectional = true, .batch_first = true});
  other.load_state_dict(one.state_dict());
  const Tensor x = random_tensor({6, 3, 5}, 1, -1, 1, DType::f32);
  const RnnOutput a = one.run(x, {}, {6, 4, 1});
  const RnnOutput b = other.run(autograd::transpose(x, 0, 1), {}, {6, 4, 1});
  EXPECT_EQ(b.y.shape(), (Shape{3, 6, 8}));
  EXPECT_EQ(autograd::transpose(b.y, 0, 1).to_vector(), a.y.to_vector());
  EXPECT_EQ(b.state.h.to_vector(), a.state.h.to_vector());
}

TEST(Recurrent, DropoutIsBetweenLayersInTrainingOnly) {
  manual_seed(3);
  LSTM plain(5, 4, {.layers = 2}), dropping(5, 4, {.layers = 2, .dropout = 0.5});
  LSTM all(5, 4, {.layers = 2, .dropout = 1.0}), last(5, 4, {.dropout = 1.0});
  dropping.load_state_dict(plain.state_dict());
  all.load_state_dict(plain.state_dict());
  const Tensor x = random_tensor({6, 3, 5}, 1, -1, 1, DType::f32);
  const std::vector<double> y = plain(x).to_vector();
  EXPECT_NE(dropping(x).to_vector(), y);
  EXPECT_EQ(all(x).to_vector(), all(x * 3.0).to_vector());  // the second layer sees zeros alone
  EXPECT_NE(last(x).to_vector(), last(x * 3.0).to_vector());
  dropping.eval();
  EXPECT_EQ(dropping(x).to_vector(), y);
  EXPECT_THAT(refusal_of([] { LSTM(5, 4, {.dropout = 2.0}); }), HasSubstr("0..1"));
}

// ---- Modules in a line a child.

struct Small : Layer<Small, std::int64_t> {
  using Layer::Layer;
  std::int64_t size = argument<0>();
  Child<LayerNorm> norm{*this, "norm", LayerNorm(size)};
  Child<Linear> fc{*this, "fc", Linear(size, size)};
  Tensor forward(const Tensor& x) override { return x + fc(norm(x)); }
};

TEST(Layer, SaysItsKindNamesItsChildrenAndClones) {
  Sequential net(Small(4), Small(4), Identity());  // moved into place
  std::vector<std::string> names;
  for (const NamedTensor& entry : net.parameters()) names.push_back(entry.name);
  EXPECT_THAT(names, ElementsAre("0.norm.weight", "0.norm.bias", "0.fc.weight", "0.fc.bias",
                                 "1.norm.weight", "1.norm.bias", "1.fc.weight", "1.fc.bias"));
  EXPECT_EQ(net.at(0).kind(), "Small");
  const Tensor x = random_tensor({2, 4}, 1, -1, 1, DType::f32);
  const std::shared_ptr<Module> copy = net.clone();
  EXPECT_EQ((*copy)(x).to_vector(), net(x).to_vector());
  Small small(3);
  const Tensor z = random_tensor({2, 3}, 1, -1, 1, DType::f32);
  const std::vector<double> before = small(z).to_vector();
  init::constant(small.fc->weight(), 0.0);
  EXPECT_NE(small(z).to_vector(), before);
}

TEST(ModuleList, HoldsModulesThatAreCalledOneByOne) {
  ModuleList<Small> layers;
  for (int i = 0; i < 3; ++i) layers.add(Small(4));
  EXPECT_EQ(layers.size(), 3u);
  EXPECT_EQ(layers.parameters().back().name, "2.fc.bias");
  const auto copy = layers.clone();
  const Tensor x = random_tensor({2, 4}, 1, -1, 1, DType::f32);
  EXPECT_EQ(dynamic_cast<ModuleList<Small>&>(*copy)[1](x).to_vector(), layers[1](x).to_vector());
  EXPECT_THAT(refusal_of([&] { layers[3]; }), HasSubstr("below 3"));
  EXPECT_THAT(refusal_of([&] { layers(x); }), HasSubstr("one by one"));
}

TEST(Module, AnErrorNamesTheLayer) {
  Sequential inner(Small(4), Linear(4, 5), Small(4));
  Sequential net(Identity(), std::move(inner));
  const std::string message = refusal_of([&] { net(random_tensor({2, 4}, 1, -1, 1, DType::f32)); });
  EXPECT_THAT(message, HasSubstr("(in 1.2.norm)"));
  EXPECT_EQ(message.find("(in"), message.rfind("(in"));
  EXPECT_THROW(net(random_tensor({2, 3}, 1, -1, 1, DType::f32)), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::nn
