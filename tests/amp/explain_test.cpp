// The numbers of an explain report on a model small enough to count by hand.
#include "cairn/amp/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "cairn/autograd/autograd.h"
#include "cairn/nn/nn.h"

namespace cairn::amp {
namespace {

using autograd::AutocastGuard;
using autograd::CastPolicy;
using autograd::CastPolicyGuard;
using autograd::Phase;
using ::testing::HasSubstr;

class Mlp : public nn::Module {
 public:
  Mlp() : up_(add_module("up", nn::Linear(16, 32))), down_(add_module("down", nn::Linear(32, 10))) {
    parameters();  // gives them their full names
  }
  std::string kind() const override { return "Mlp"; }
  Tensor forward(const Tensor& x) override { return (*down_)(autograd::relu((*up_)(x))); }

 private:
  std::shared_ptr<nn::Linear> up_, down_;
};

// 8 rows; forward in a region, loss outside.
void step(Mlp& model) {
  const Tensor x = Tensor::full({8, 16}, 0.5), target = Tensor::full({8, 10}, 0.1);
  Tensor y;
  {
    const AutocastGuard autocast(true, DType::bf16);
    y = autograd::softmax(model(x));
  }
  autograd::backward(autograd::mse_loss(y, target));
}

const ExplainRow& row(const ExplainReport& report, const std::string& op, Phase phase) {
  const ExplainRow* found = nullptr;
  for (const ExplainRow& candidate : report.rows) {
    if (candidate.op == op && candidate.phase == phase) found = &candidate;
  }
  if (found == nullptr) throw std::runtime_error("no row " + op);
  return *found;
}

TEST(Explain, CountsOperationsCastsAndBytes) {
  Mlp model;
  Explain explain;
  for (int i = 0; i < 3; ++i, explain.step()) step(model);
  const ExplainReport report = explain.report();
  EXPECT_EQ(report.steps, 3);

  const ExplainRow& linear = row(report, "linear", Phase::forward);
  EXPECT_EQ(linear.count, 3 * 2);
  EXPECT_EQ(linear.dtype, DType::bf16);
  EXPECT_EQ(linear.why, "half: matrix product");
  EXPECT_EQ(linear.casts, 3 * 5);  // x, and two weights and biases; relu's result is bf16 already
  EXPECT_EQ(linear.bytes_cast, 3 * 2 * (8 * 16 + 16 * 32 + 32 + 32 * 10 + 10));
  EXPECT_EQ(linear.cache_hits, 0);
  const ExplainRow& softmax = row(report, "softmax", Phase::forward);
  EXPECT_EQ(softmax.why, "f32: softmax sums");
  EXPECT_EQ(softmax.casts, 3);
  EXPECT_EQ(softmax.bytes_cast, 3 * 4 * 8 * 10);
  EXPECT_EQ(row(report, "relu", Phase::forward).why, "keep: as its input");
  EXPECT_EQ(row(report, "relu", Phase::forward).dtype, DType::bf16);
  EXPECT_EQ(row(report, "mse_loss", Phase::forward).why, "outside autocast");
  const ExplainRow& back = row(report, "linear", Phase::backward);
  EXPECT_EQ(back.count, 6);
  EXPECT_EQ(back.dtype, DType::bf16);
  EXPECT_EQ(back.why, "as its forward");

  // 6 casts forward; backward the same but x's, which wants no gradient.
  const std::int64_t weights = 16 * 32 + 32 + 32 * 10 + 10;
  EXPECT_EQ(report.casts, 3 * (6 + 5));
  EXPECT_EQ(report.bytes_cast, 3 * (2 * (8 * 16 + weights) + 4 * 80 + 4 * weights + 2 * 80));
  EXPECT_EQ(report.cache_hits, 0);
}

TEST(Explain, CountsWhatTheCacheSaves) {
  Mlp model;
  Explain explain;
  {
    const AutocastGuard autocast(true);
    const Tensor x = Tensor::full({8, 16}, 0.5, DType::f16);
    for (int i = 0; i < 3; ++i) model(x);
  }
  const ExplainReport report = explain.report();
  EXPECT_EQ(report.steps, 1);
  EXPECT_EQ(report.casts, 4);
  EXPECT_EQ(report.cache_hits, 8);
  EXPECT_EQ(row(report, "linear", Phase::forward).cache_hits, 8);
}

TEST(Explain, TellsWhichProductsFitTensorCores) {
  Mlp model;
  Explain explain;
  step(model);
  const ExplainReport report = explain.report();
  EXPECT_EQ(report.products, 2);
  EXPECT_EQ(report.tensor_core, 1);
  ASSERT_EQ(report.misfits.size(), 1u);
  EXPECT_EQ(report.misfits[0].where, "down.weight");
  EXPECT_EQ(report.misfits[0].reason, "N 10 is no multiple of 8");

  Explain plain;
  model(Tensor::full({7, 16}, 0.5));
  const AutocastGuard autocast(true);
  using autograd::conv2d, autograd::matmul;
  matmul(Tensor::zeros({2, 7, 8}), Tensor::zeros({8, 8}));
  conv2d(Tensor::zeros({1, 3, 8, 8}), Tensor::zeros({16, 3, 3, 3}));
  conv2d(Tensor::zeros({1, 8, 8, 8}), Tensor::zeros({16, 8, 3, 3}));
  autograd::scaled_dot_product_attention(Tensor::zeros({1, 2, 8, 16}),
                                         Tensor::zeros({1, 2, 24, 16}),
                                         Tensor::zeros({1, 2, 24, 16}), false);
  autograd::self_attention(Tensor::zeros({1, 5, 24}), 1, true);
  const ExplainReport sizes = plain.report();
  EXPECT_EQ(sizes.products, 7);
  EXPECT_EQ(sizes.tensor_core, 2);
  std::vector<std::string> reasons;
  for (const ExplainMisfit& misfit : sizes.misfits) reasons.push_back(misfit.reason);
  EXPECT_THAT(reasons,
              ::testing::ElementsAre("runs in f32", "runs in f32", "M 7 is no multiple of 8",
                                     "input channels per group 3 is no multiple of 8",
                                     "T 5 is no multiple of 8"));
}

TEST(Explain, SaysWhyInEveryCase) {
  const auto why_of = [](auto f) {
    Explain explain;
    f();
    return explain.report().rows.back().why;
  };
  const Tensor wide = Tensor::full({2, 2}, 0.5), narrow = Tensor::full({2, 2}, 0.5, DType::f16);
  const Tensor exact = Tensor::full({2, 2}, 0.5, DType::f64);
  EXPECT_EQ(why_of([&] { wide + narrow; }), "outside autocast");
  EXPECT_EQ(why_of([&] { autograd::to(wide, DType::f16); }), "f32 to f16");
  const AutocastGuard autocast(true);
  EXPECT_EQ(why_of([&] { narrow + wide; }), "promote: widest of f16, f32");
  EXPECT_EQ(why_of([&] { autograd::matmul(wide, wide); }), "half: matrix product");
  EXPECT_EQ(why_of([&] { autograd::matmul(exact, exact); }), "f64 is left alone");
  EXPECT_EQ(why_of([&] { autograd::binary_cross_entropy(wide, wide); }),
            "banned in half, and the input is not");
  EXPECT_EQ(why_of([&] { autograd::cross_entropy(narrow, Tensor::zeros({2}, DType::i64)); }),
            "keep: f32 inside, no copy of the logits");
  const CastPolicyGuard policies({{"softmax", CastPolicy::half}});
  EXPECT_EQ(why_of([&] { autograd::softmax(narrow); }), "override: half");
}

TEST(Explain, RendersATableAndJson) {
  Mlp model;
  Explain explain;
  for (int i = 0; i < 2; ++i, explain.step()) step(model);
  const ExplainReport report = explain.report();
  const std::string table = report.table();
  EXPECT_THAT(table, HasSubstr("per step, over 2 steps: 11 casts ("));
  EXPECT_THAT(table, HasSubstr("1 of 2 products fit tensor cores"));
  EXPECT_THAT(table, HasSubstr("linear     forward       2  bf16      5  2004 B       -  half: "
                               "matrix product\n"));
  EXPECT_THAT(table, HasSubstr("down.weight"));
  EXPECT_EQ(table.find(" \n"), table.npos);

  const auto json = nlohmann::json::parse(report.json());
  EXPECT_EQ(json["steps"], 2);
  EXPECT_EQ(json["casts"], 22);
  EXPECT_EQ(json["rows"].size(), report.rows.size());
  EXPECT_EQ(json["rows"][0]["op"], "cast");
  EXPECT_EQ(json["misfits"][0]["parameter"], "down.weight");
}

TEST(Explain, EndsWithItsScopeAndSeesItsOwnThreadOnly) {
  {
    Explain outer;
    {
      Explain inner;
      autograd::relu(Tensor::zeros({1}));
      EXPECT_EQ(inner.report().rows.size(), 1u);
    }
    EXPECT_EQ(outer.report().rows.size(), 1u);  // sees through the inner one
    std::thread([] { autograd::relu(Tensor::zeros({1})); }).join();
    EXPECT_EQ(outer.report().rows[0].count, 1);
  }
  EXPECT_EQ(autograd::set_observer(nullptr), nullptr);
}

}  // namespace
}  // namespace cairn::amp
