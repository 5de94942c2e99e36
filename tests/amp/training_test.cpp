// Whole trainings at every level: falling losses, master weights, overflows, accumulation,
// clipping.
#include <gmock/gmock.h>

#include <cmath>
#include <tuple>

#include "cairn/kernels/optimizer_update.h"
#include "cairn/optim/accumulation.h"
#include "support.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

class TrainingRun : public testing::TestWithParam<std::tuple<OptLevel, DType>> {
 protected:
  Options options() const {
    return {.opt_level = std::get<0>(GetParam()), .half_dtype = std::get<1>(GetParam())};
  }
};

TEST_P(TrainingRun, LossFalls) {
  Classifier run(options(), {.lr = 1e-2});
  double first = 0, last = 0;
  for (std::uint64_t step = 0; step < 60; ++step) {
    const Tensor loss = loss_of(run.model, make_batch(step % 10));
    run.precision.backward(loss);
    expect_applied(run.precision.step());
    (step < 10 ? first : last) = loss.item();
  }
  EXPECT_LT(last, 0.6 * first);
}

TEST_P(TrainingRun, AnOverflowSkipsNamesHalvesAndTouchesNothing) {
  Classifier run(options());
  run.model.eval();  // running statistics would take the inf in
  run.train(0, 3);
  const auto before = run.everything();
  const double scale = run.precision.loss_scale();

  Batch bad = make_batch(9);
  test::set_element(bad.x, 5, kInf);
  const optim::StepResult result = run.train(bad);
  EXPECT_FALSE(result.applied);
  EXPECT_FALSE(result.culprit.empty());
  EXPECT_THAT(result.reason, HasSubstr(" in the gradient of " + result.culprit + " ("));
  EXPECT_EQ(run.everything(), before);
  EXPECT_EQ(run.optimizer.steps(), 3);
  const bool dynamic = run.precision.options().dynamic_loss_scale;
  EXPECT_EQ(scale, dynamic ? 65536.0 : 1.0);
  EXPECT_EQ(run.precision.loss_scale(), dynamic ? 32768.0 : 1.0);
  EXPECT_THAT(result.reason,
              HasSubstr(dynamic ? "; loss scale 65536 -> 32768" : "; loss scale stays 1 (static)"));
  run.train(10, 11);
}

INSTANTIATE_TEST_SUITE_P(Levels, TrainingRun,
                         testing::Combine(testing::ValuesIn(kLevels), testing::ValuesIn(kHalves)),
                         [](const auto& info) {
                           return core::str(name(std::get<0>(info.param)), "_",
                                            std::get<1>(info.param));
                         });

TEST(AmpStep, O2EqualsHandWrittenMasterWeightsBitForBit) {
  for (const DType half : kHalves) {
    const double scale = 256.0, lr = 1e-2;
    nn::Sequential by_hand = make_model();
    Classifier run({.opt_level = OptLevel::O2, .half_dtype = half, .loss_scale = scale},
                   {.lr = lr, .weight_decay = 0.1});

    // Batch norm stays f32; every other weight is the half rounding of an f32 master.
    struct Weight {
      Tensor parameter, master, m, v;
    };
    std::vector<Weight> weights;
    for (NamedTensor entry : by_hand.parameters()) {
      const Shape shape = entry.tensor.shape();
      const Values start = values(entry.tensor);
      if (entry.name[0] != '1') entry.tensor.set_data(Tensor::from(start, shape, half));
      weights.push_back({entry.tensor, Tensor::from(start, shape, DType::f32), Tensor::zeros(shape),
                         Tensor::zeros(shape)});
    }
    for (std::uint64_t step = 0; step < 20; ++step) {
      const Batch batch = make_batch(step);
      expect_applied(run.train(batch));

      const Tensor y = autograd::to(by_hand(autograd::to(batch.x, half)), DType::f32);
      autograd::backward(autograd::affine(autograd::cross_entropy(y, batch.labels), scale, 0.0));
      for (Weight& w : weights) {
        Values unscaled = values(w.parameter.grad());
        for (double& g : unscaled) g /= scale;  // exact: a power of two
        const double count = static_cast<double>(step + 1);
        kernels::update(
            {{Tensor::from(unscaled, w.master.shape(), DType::f32), w.master, {}, w.m, w.v}},
            kernels::AdamOptions{.lr = lr,
                                 .weight_decay = 0.1,
                                 .correction1 = 1 - std::pow(0.9, count),
                                 .correction2 = 1 - std::pow(0.999, count)});
        kernels::copy(w.master, w.parameter);
        w.parameter.clear_grad();
      }
    }
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_EQ(values(run.parameter(i)), values(weights[i].parameter)) << i;
      EXPECT_EQ(exact(run.parameter(i)), values(weights[i].master)) << i;
    }
  }
}

TEST(AmpStep, TheLossIsScaledInF32) {
  const SgdClassifier run({.opt_level = OptLevel::O2});
  const Tensor scaled = run.precision.scale_loss(Tensor::full({}, 100.0, DType::f16)).tensor();
  EXPECT_EQ(scaled.dtype(), DType::f32);
  EXPECT_EQ(scaled.item(), 6553600.0);
  for (const Tensor& no_loss : {Tensor(), Tensor::zeros({2}), Tensor::zeros({}, DType::i64)}) {
    EXPECT_THROW((void)run.precision.scale_loss(no_loss), core::InvalidArgument);
  }
}

TEST(AmpStep, ClipsTheUnscaledGradient) {
  SgdClassifier run({.opt_level = OptLevel::O2, .max_gradient_norm = 1e-3});
  SgdClassifier plain({.opt_level = OptLevel::O0});
  const optim::StepResult clipped = run.train(make_batch(1)), free = plain.train(make_batch(1));
  EXPECT_NEAR(clipped.gradient_norm, free.gradient_norm, 1e-2 * free.gradient_norm);
  EXPECT_NEAR(clipped.clip_coefficient, 1e-3 / (clipped.gradient_norm + 1e-6), 1e-9);
  EXPECT_EQ(free.clip_coefficient, 1.0);
}

TEST(AmpStep, RemainderMastersTrainTheSameTruth) {
  std::vector<Values> truths[2];
  for (const auto storage : {optim::MasterStorage::f32, optim::MasterStorage::remainder}) {
    Classifier run({.opt_level = OptLevel::O2, .half_dtype = DType::bf16}, {.lr = 1e-2},
                   make_model(), {.masters = storage});
    run.train(0, 20);
    EXPECT_EQ(test::kept_as(run.parameter(0)), storage);
    std::vector<Values>& truth = truths[storage == optim::MasterStorage::remainder];
    truth = exact(run.model.parameters());
    run.precision.release();
    EXPECT_EQ(values(run.model.parameters()), truth);
  }
  EXPECT_EQ(truths[0], truths[1]);
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  optimizer.set_state_options({.masters = optim::MasterStorage::remainder});
  EXPECT_THROW((void)initialize(model, optimizer, kO2), core::InvalidArgument);
  EXPECT_EQ(model.parameters()[0].tensor.dtype(), DType::f32);
}

TEST(AmpStep, TwoHandlesSideBySideDoNotSeeEachOther) {
  const auto run = [](bool interleaved) {
    Classifier first({.opt_level = OptLevel::O2});
    Classifier second({.opt_level = OptLevel::O1, .half_dtype = DType::bf16});
    Batch bad = make_batch(50);
    test::set_element(bad.x, 0, kNaN);
    for (std::uint64_t step = 0; step < 6; ++step) {
      EXPECT_EQ(first.train(step == 3 ? bad : make_batch(step)).applied, step != 3);
      if (interleaved) second.train(step, step + 1);
    }
    if (!interleaved) second.train(0, 6);
    EXPECT_EQ(first.precision.loss_scale(), 32768.0);
    EXPECT_EQ(second.precision.loss_scale(), 1.0);
    return std::pair(second.everything(), values(first.parameter(0)));
  };
  EXPECT_EQ(run(true), run(false));
}

// ---- optim::Accumulation: uneven micro-batches train as the whole batch does

const std::vector<std::int64_t> kCounts = {5, 1, 15, 11};  // of the 32

nn::Sequential plain_model() {  // no batch norm: it sees micro-batches
  manual_seed(3);
  return nn::Sequential(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 4));
}

Batch part_of(const Batch& batch, std::int64_t begin, std::int64_t count) {
  const auto rows = [&](const Tensor& x) {
    return x.alias(x.view().slice(0, begin, begin + count));
  };
  return {rows(batch.x), rows(batch.labels)};
}

/// One window; gradients of micro-batch `bad` are beyond f16.
template <class Run>
optim::StepResult window(Run& run, optim::Accumulation& accumulation, const Batch& batch,
                         int bad = -1) {
  std::int64_t begin = 0;
  for (std::size_t k = 0; k < kCounts.size(); ++k) {
    const auto micro = accumulation.begin(kCounts[k]);
    EXPECT_EQ(micro.last(), k + 1 == kCounts.size());
    Tensor loss = loss_of(run.model, part_of(batch, begin, kCounts[k]));
    if (static_cast<int>(k) == bad) loss = autograd::affine(loss, 1e8, 0.0);
    run.precision.backward(loss, {.weight = micro.weight()});
    begin += kCounts[k];
  }
  return run.precision.step({.gradient_scale = accumulation.finish()});
}

struct Level {
  OptLevel level;
  DType half;
  double tolerance;  // after ten steps, of weights up to 0.5 that move by up to 0.1
};

class AmpAccumulation : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(
    Levels, AmpAccumulation,
    testing::Values(Level{OptLevel::O0, DType::f16, 2e-6}, Level{OptLevel::O1, DType::f16, 2e-3},
                    Level{OptLevel::O2, DType::f16, 2e-3}, Level{OptLevel::O2, DType::bf16, 1e-2}),
    [](const auto& info) { return core::str(name(info.param.level), "_", info.param.half); });

TEST_P(AmpAccumulation, UnevenMicroBatchesTrainAsTheWholeBatch) {
  const Level& level = GetParam();
  Options options{.opt_level = level.level, .half_dtype = level.half};
  options.scaler.init_scale = 4096.0;  // sums of four micro-batches stay within f16
  const optim::SgdOptions sgd{.lr = 0.1, .momentum = 0.9};
  SgdClassifier parts(options, sgd, plain_model()), whole(options, sgd, plain_model());
  optim::Accumulation accumulation({.steps = static_cast<std::int64_t>(kCounts.size())});
  for (std::uint64_t step = 0; step < 10; ++step) {
    const Batch batch = make_batch(step);
    const auto a = window(parts, accumulation, batch);
    const auto b = whole.train(batch);
    ASSERT_EQ(a.applied, b.applied) << a.reason << b.reason;
    EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 0.02 * b.gradient_norm);
  }
  const auto expected = exact(whole.model.parameters()), got = exact(parts.model.parameters());
  for (std::size_t p = 0; p < got.size(); ++p) {
    test::expect_close(got[p], expected[p], 0, level.tolerance);
  }
}

TEST(AmpAccumulationOverflow, InAnyMicroBatchSkipsTheWindowOnce) {
  for (int bad = 0; bad < 4; ++bad) {
    Classifier run({.opt_level = OptLevel::O2}, {}, plain_model());
    optim::Accumulation accumulation({.steps = 4});
    const auto before = run.everything();
    EXPECT_FALSE(window(run, accumulation, make_batch(1), bad).applied);
    EXPECT_EQ(run.everything(), before);
    EXPECT_EQ(run.precision.loss_scale(), 32768.0);
    EXPECT_TRUE(window(run, accumulation, make_batch(2)).applied);
    EXPECT_EQ(run.optimizer.steps(), 1);
  }
}

}  // namespace
}  // namespace cairn::amp
