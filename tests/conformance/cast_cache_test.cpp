// Apex's test_cache: the gradient of a weight used twice in a forward, over train, no_grad eval,
// write and train, with the loss scaled by 4, against the f32 gradient.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/module.h"
#include "cairn/optim/sgd.h"

namespace cairn {
namespace {

using namespace autograd;  // NOLINT: every operation by its name

constexpr double kScale = 4.0;

struct Use {
  const char* name;  // an operation of each list
  Tensor (*f)(const Tensor& x, const Tensor& w);
};

const Use kUses[] = {
    {"mm", [](const Tensor& x, const Tensor& w) { return sum(matmul(matmul(x, w), w)); }},
    {"pow", [](const Tensor& x, const Tensor& w) { return sum(pow(x, w) + pow(x, w)); }},
    {"mul", [](const Tensor& x, const Tensor& w) { return sum(mul(mul(x, w), w)); }},
};

// Apex runs with f16 weights too, which amp::initialize refuses: the region is opened here.
class CastCache : public ::testing::TestWithParam<std::tuple<Use, DType, DType>> {
 protected:
  CastCache() {
    std::vector<float> values(64);
    std::iota(values.begin(), values.end(), 1.0f);
    for (float& value : values) value = value / 64.0f + 1.0f;  // exact in both halves
    w_ = to(Tensor::from(values, {8, 8}), weight_dtype()).detach();
    w_.set_requires_grad(true);
  }

  static const Use& use() { return std::get<0>(GetParam()); }
  static DType weight_dtype() { return std::get<1>(GetParam()); }
  static DType half() { return std::get<2>(GetParam()); }

  Tensor loss() const { return use().f(x_, w_); }

  std::vector<double> reference() const {
    const AutocastGuard off(false);
    const Tensor w = Tensor::from(w_.to_vector(), {8, 8}, DType::f32).set_requires_grad(true);
    backward(use().f(x_, w));
    return w.grad().to_vector();
  }

  void train() {
    w_.clear_grad();
    backward(affine(to(loss(), DType::f32), kScale, 0.0));
    EXPECT_EQ(w_.grad().dtype(), weight_dtype());
    const std::vector<double> got = w_.grad().to_vector(), expected = reference();
    const bool exact = weight_dtype() == DType::f32 && use().name != std::string("mm");
    const bool coarse = half() == DType::bf16 || weight_dtype() == DType::bf16;
    const double tolerance = exact ? 1e-5 : coarse ? 3e-2 : 4e-3;  // two roundings
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i] / kScale, expected[i], tolerance * (1 + std::abs(expected[i]))) << i;
    }
  }

  void evaluate() const {
    const NoGradGuard no_grad;
    EXPECT_FALSE(loss().requires_grad());
  }

  void write() const {  // weight -= 1, as an optimizer writes
    kernels::affine(w_, 1.0, -1.0, w_);
  }

  Tensor x_ = Tensor::full({4, 8}, 1.0), w_;
};

// As Apex: a region per forward.
TEST_P(CastCache, TrainEvalTrain) {
  if (use().name != std::string("mm")) x_ = Tensor::full({8, 8}, 1.5);
  for (int round = 0; round < 2; ++round) {
    {
      const AutocastGuard autocast(true, half());
      train();
      write();
    }
    const AutocastGuard autocast(true, half());
    evaluate();
  }
}

// Harder: everything in one region, which Apex's and torch's caches do not survive.
TEST_P(CastCache, TrainEvalTrainInOneRegion) {
  if (use().name != std::string("mm")) x_ = Tensor::full({8, 8}, 1.5);
  const AutocastGuard autocast(true, half());
  evaluate();
  train();
  write();
  evaluate();
  train();
  train();
  write();
  train();
}

TEST_P(CastCache, TrainEvalLoadTrainInOneRegion) {
  if (use().name != std::string("mm")) x_ = Tensor::full({8, 8}, 1.5);
  const AutocastGuard autocast(true, half());
  train();
  evaluate();
  const double before = loss().item();
  kernels::copy(Tensor::full({8, 8}, 1.25), w_);  // as load_state_dict writes
  EXPECT_NE(loss().item(), before);
  train();
}

INSTANTIATE_TEST_SUITE_P(Uses, CastCache,
                         ::testing::Combine(::testing::ValuesIn(kUses),
                                            ::testing::Values(DType::f16, DType::bf16, DType::f32),
                                            ::testing::Values(DType::f16, DType::bf16)),
                         [](const auto& info) {
                           return core::str(std::get<0>(info.param).name, "_weight_",
                                            std::get<1>(info.param), "_region_",
                                            std::get<2>(info.param));
                         });

// The same through amp at O1, with an optimizer's step and load_state_dict as the writes.
class OneWeight : public nn::Module {
 public:
  OneWeight() : w_(add_parameter("w", Tensor::full({8, 8}, 1.25))) {}
  std::string kind() const override { return "OneWeight"; }
  Tensor forward(const Tensor& x) override { return matmul(matmul(x, w_), w_); }
  const Tensor& weight() const { return w_; }

 private:
  Tensor w_;
};

TEST(CastCacheOfAmp, StepsAndLoadsAreSeen) {
  OneWeight model;
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.25});
  amp::Amp precision =
      amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O1, .loss_scale = kScale});
  const Tensor x = Tensor::full({4, 8}, 1.0);
  const AutocastGuard around(true);  // the model's own region nests: one cache over all of it
  const double loss = model(x).to_vector()[0];
  precision.backward(sum(model(x)));
  ASSERT_TRUE(precision.step().applied);
  const NoGradGuard no_grad;
  const Tensor stepped = model(x);
  EXPECT_NE(stepped.to_vector()[0], loss);
  const double w = model.weight().to_vector()[0];
  EXPECT_NEAR(stepped.to_vector()[0], 64 * w * w, 0.01 * 64 * w * w);
  StateDict saved;
  saved.set("w", Tensor::full({8, 8}, 1.25));
  model.load_state_dict(saved);
  EXPECT_EQ(model(x).to_vector()[0], loss);
}

}  // namespace
}  // namespace cairn
