#include "cairn/amp/anomaly.h"

#include <gmock/gmock.h>

#include "cairn/amp/explain.h"
#include "cairn/autograd/autograd.h"
#include "support.h"

namespace cairn::amp {
namespace {

using autograd::AutocastGuard;
using autograd::backward;
using autograd::Phase;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Anomaly anomaly_of(const std::function<void()>& f, AnomalyOptions options = {}) {
  const AnomalyMode mode(options);
  try {
    f();
  } catch (const AnomalyError& error) {
    EXPECT_THAT(error.what(), HasSubstr(error.anomaly().describe()));
    return error.anomaly();
  }
  ADD_FAILURE() << "no anomaly";
  return {};
}

Tensor named(const Shape& shape, double value, const std::string& name) {
  Tensor leaf = Tensor::full(shape, value).set_requires_grad(true);
  leaf.set_name(name);
  return leaf;
}

TEST(Anomaly, NamesTheFirstOperationForward) {
  const Tensor x = Tensor::from(std::vector<float>{0.5f, 0.0f, -1.0f}, {3});
  const Anomaly anomaly =
      anomaly_of([&] { autograd::exp(autograd::log(autograd::affine(x, 2, 0))); });
  EXPECT_EQ(anomaly.op.op, "log");
  EXPECT_EQ(anomaly.op.phase, Phase::forward);
  EXPECT_EQ(anomaly.op.results[0].min, 0.0);
  EXPECT_EQ(anomaly.op.results[0].max, 0.0);  // log 1, the one finite value
  ASSERT_EQ(anomaly.inputs.size(), 1u);
  EXPECT_EQ(anomaly.inputs[0].min, -2.0);
  EXPECT_EQ(anomaly.inputs[0].max, 1.0);
  ASSERT_EQ(anomaly.before.size(), 1u);
  EXPECT_EQ(anomaly.before[0].op, "affine");
  EXPECT_EQ(anomaly.headline(), "log made 1 inf, 1 NaN of 3 values f32");
}

TEST(Anomaly, NamesTheParametersOfTheModule) {
  const Tensor weight = named({4, 4}, 300.0, "block.fc.weight"), x = Tensor::full({2, 4}, 300.0);
  const Anomaly product = anomaly_of([&] {
    const AutocastGuard autocast(true);
    autograd::linear(x, weight);
  });
  EXPECT_EQ(product.op.op, "linear");  // 4 * 300 * 300 > 65504
  EXPECT_THAT(product.op.parameters, ElementsAre("block.fc.weight"));
  EXPECT_THAT(product.headline(), HasSubstr("linear (block.fc.weight) made 8 inf of 8 values f16"));

  const Tensor large = named({2, 2}, 1e5, "block.head.weight");
  const Anomaly cast = anomaly_of([&] {
    const AutocastGuard autocast(true);
    autograd::matmul(Tensor::full({2, 2}, 1.0), large);
  });
  EXPECT_EQ(cast.op.op, "cast");
  EXPECT_THAT(cast.op.parameters, ElementsAre("block.head.weight"));

  const Anomaly after = anomaly_of([&] { autograd::exp(autograd::linear(x, weight)); });
  EXPECT_EQ(after.op.op, "exp");
  EXPECT_THAT(after.headline(), HasSubstr("exp after block.fc made"));
}

TEST(Anomaly, NamesTheFirstOperationBackward) {
  const Tensor w = named({2}, 0.0, "scale");
  const Anomaly anomaly = anomaly_of([&] { backward(autograd::sum(autograd::sqrt(w))); });
  EXPECT_EQ(anomaly.op.op, "sqrt");
  EXPECT_EQ(anomaly.op.phase, Phase::backward);
  EXPECT_THAT(anomaly.op.parameters, ElementsAre("scale"));
  EXPECT_EQ(anomaly.headline(),
            "the backward of sqrt (scale) made 2 inf of 2 values f32 in the gradient of input 0");
  EXPECT_EQ(anomaly.before.size(), 3u);
}

TEST(Anomaly, FindsAScaledGradientThatOverflowsHalf) {
  const Tensor w = named({8, 8}, 1.0, "fc.weight");
  const Anomaly anomaly = anomaly_of([&] {
    Tensor loss;
    {
      const AutocastGuard autocast(true);
      loss = autograd::sum(autograd::linear(Tensor::full({4, 8}, 2.0), w));
    }
    backward(loss * 65536.0);
  });
  EXPECT_EQ(anomaly.op.phase, Phase::backward);
  EXPECT_EQ(anomaly.op.op, "cast");  // the f32 gradient of sum's input into half
  EXPECT_EQ(anomaly.op.results[0].dtype, DType::f16);
  EXPECT_TRUE(anomaly.inputs[0].finite());
}

TEST(Anomaly, FindsASumOfGradientsThatOverflows) {
  const Tensor w = Tensor::full({2}, 1.0, DType::f16).set_requires_grad(true);
  const Tensor dy = Tensor::full({2}, 40000.0, DType::f16);
  Tensor(w).set_name("w");
  const Anomaly anomaly = anomaly_of([&] {
    backward(autograd::relu(w), dy);
    backward(autograd::relu(w), dy);
  });
  EXPECT_EQ(anomaly.op.op, "accumulate_grad");
  EXPECT_THAT(anomaly.op.parameters, ElementsAre("w"));
}

// Runs operations in its backward, as recomputation does.
struct Replays {
  static constexpr autograd::OpInfo kInfo{"replays"};
  Tensor forward(autograd::Context&, const Tensor& x) {
    Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  autograd::Tensors backward(autograd::Context&, const Tensor& dy) {
    autograd::ThreadState replay = autograd::ThreadState::capture();
    replay.recomputing = true;
    const autograd::ThreadStateGuard guard(replay);
    return {autograd::log(dy * 0.0)};
  }
};

TEST(Anomaly, KeepsItsTypeOutOfAReplay) {
  const Tensor w = named({2}, 1.0, "w");
  const Anomaly anomaly =
      anomaly_of([&] { backward(autograd::sum(autograd::apply(Replays{}, w))); });
  EXPECT_EQ(anomaly.op.phase, Phase::recompute);
  EXPECT_THAT(anomaly.headline(), HasSubstr("log, recomputed,"));
}

TEST(Anomaly, SaysWhereTheInputWasBadAlready) {
  const Tensor x = Tensor::full({3}, kNaN);
  EXPECT_THAT(anomaly_of([&] { autograd::relu(x); }).headline(),
              HasSubstr("; its input 0 held 3 NaN already"));
}

TEST(Anomaly, ARangeIsThatOfTheFiniteValues) {
  const Tensor x = Tensor::from(std::vector<float>{-1.0f, 0.0f, 1.0f}, {3});
  const Anomaly anomaly = anomaly_of([&] { autograd::exp(autograd::affine(x, 1000.0, 0.0)); });
  EXPECT_EQ(anomaly.op.results[0].inf, 1);
  EXPECT_EQ(anomaly.op.results[0].min, 0.0);
  EXPECT_EQ(anomaly.op.results[0].max, 1.0);
}

TEST(Anomaly, TellsTheRangesOfTheLastOperations) {
  const Tensor x = Tensor::full({2}, 3.0, DType::bf16);
  const Anomaly anomaly = anomaly_of(
      [&] {
        Tensor y = x;
        for (int i = 0; i < 5; ++i) y = y * 2.0;
        autograd::log(autograd::affine(y, 0.0, -1.0));
      },
      {.history = 3});
  ASSERT_EQ(anomaly.before.size(), 3u);
  EXPECT_EQ(anomaly.before[1].results[0].max, 96.0);
  EXPECT_EQ(anomaly.before[2].results[0].min, -1.0);
  const std::string text = anomaly.describe();
  EXPECT_THAT(text, AllOf(HasSubstr("its inputs:\n  0: bf16 [2] in -1 .. -1"),
                          HasSubstr("affine     forward  -           bf16   [2]     96   96  -\n"),
                          HasSubstr("2 NaN")));
}

TEST(Anomaly, RecordsTheFirstAndGoesOn) {
  const Tensor x = Tensor::zeros({2});
  AnomalyMode mode({.throws = false});
  EXPECT_FALSE(mode.first());
  autograd::log(x);
  autograd::pow(x, -1.0);
  ASSERT_TRUE(mode.first());
  EXPECT_EQ(mode.first()->op.op, "log");
  mode.clear();
  EXPECT_FALSE(mode.first());
  autograd::pow(x, -1.0);
  EXPECT_EQ(mode.first()->op.op, "pow");
}

TEST(Anomaly, PassesOverOperationsThatMayMakeInf) {
  const AnomalyMode mode({.ignore = {"log"}});
  const Tensor y = autograd::log(Tensor::zeros({2}));
  EXPECT_THROW(autograd::relu(y * -1.0), AnomalyError);
}

TEST(Anomaly, LeavesTheThreadAsItWas) {
  const Tensor w = named({2}, 0.0, "w");
  {
    Explain explain;
    const AnomalyMode mode;
    EXPECT_THROW(backward(autograd::sum(autograd::sqrt(w))), AnomalyError);
    EXPECT_FALSE(autograd::in_backward());
    EXPECT_TRUE(autograd::grad_enabled());
    EXPECT_THROW(autograd::log(Tensor::zeros({2})), AnomalyError);
    EXPECT_TRUE(autograd::grad_enabled());
    EXPECT_EQ(explain.report().rows.size(), 5u);  // the observer before sees everything
  }
  autograd::log(Tensor::zeros({2}));
  EXPECT_EQ(autograd::set_observer(nullptr), nullptr);
}

}  // namespace
}  // namespace cairn::amp
