// Whole trainings at every level: falling losses, master weights, overflows, accumulation,
// clipping.
#include <gmock/gmock.h>

#include <cmath>

#include "cairn/kernels/optimizer_update.h"
#include "support.h"

namespace cairn::amp {
namespace {

using test::expect_applied;
using testing::HasSubstr;

struct LevelCase {
  OptLevel level;
  DType half;
};
std::string level_name(const testing::TestParamInfo<LevelCase>& info) {
  return core::str(name(info.param.level), "_", info.param.half);
}
std::vector<LevelCase> all_levels() {
  std::vector<LevelCase> all;
  for (const OptLevel level : kLevels) {
    for (const DType half : kHalves) all.push_back({level, half});
  }
  return all;
}

class TrainingRun : public testing::TestWithParam<LevelCase> {
 protected:
  Options options() const { return {.opt_level = GetParam().level, .half_dtype = GetParam().half}; }
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

INSTANTIATE_TEST_SUITE_P(Levels, TrainingRun, testing::ValuesIn(all_levels()), level_name);

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

TEST(AmpStep, ADifferentScaleDoesNotChangeF32Training) {
  Classifier one({.opt_level = OptLevel::O0, .loss_scale = 1.0});
  Classifier other({.opt_level = OptLevel::O0, .loss_scale = 1024.0});
  one.train(0, 5);
  other.train(0, 5);
  EXPECT_EQ(one.everything(), other.everything());  // powers of two are exact
}

TEST(AmpStep, AccumulationAverages) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O2}) {
    nn::Sequential split(nn::Linear(8, 4)), whole(nn::Linear(8, 4));
    whole.load_state_dict(split.state_dict());
    optim::FusedSGD split_optimizer(split.parameters(), {.lr = 0.5});
    optim::FusedSGD whole_optimizer(whole.parameters(), {.lr = 0.5});
    Amp split_precision = initialize(split, split_optimizer, {.opt_level = level});
    Amp whole_precision = initialize(whole, whole_optimizer, {.opt_level = level});
    const Batch a = make_batch(1), b = make_batch(2);
    split_precision.backward(loss_of(split, a));
    split_precision.backward(loss_of(split, b));
    expect_applied(split_precision.step({.gradient_scale = 0.5}));
    const Batch both{autograd::concat({a.x, b.x}), autograd::concat({a.labels, b.labels})};
    expect_applied(train_step(whole, whole_precision, both));
    const double tolerance = level == OptLevel::O0 ? 1e-6 : 2e-3;
    for (std::size_t i = 0; i < 2; ++i) {
      test::expect_close(split.parameters()[i].tensor, values(whole.parameters()[i].tensor),
                         tolerance, tolerance);
    }
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
    nn::Sequential model = make_model();
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
    optimizer.set_state_options({.masters = storage});
    Amp precision =
        initialize(model, optimizer, {.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
    for (std::uint64_t step = 0; step < 20; ++step) {
      expect_applied(train_step(model, precision, make_batch(step)));
    }
    EXPECT_EQ(test::kept_as(model.parameters()[0].tensor), storage);
    std::vector<Values>& truth = truths[storage == optim::MasterStorage::remainder];
    truth = exact(model.parameters());
    precision.release();
    EXPECT_EQ(values(model.parameters()), truth);
  }
  EXPECT_EQ(truths[0], truths[1]);
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  optimizer.set_state_options({.masters = optim::MasterStorage::remainder});
  EXPECT_THROW(initialize(model, optimizer, kO2), core::InvalidArgument);
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

}  // namespace
}  // namespace cairn::amp
