// Whole trainings at every level: falling losses, master weights, overflows, accumulation,
// clipping.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "cairn/core/error.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/step.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

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

class TrainingRun : public testing::TestWithParam<LevelCase> {};

TEST_P(TrainingRun, LossFalls) {
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
  Amp precision =
      initialize(model, optimizer, {.opt_level = GetParam().level, .half_dtype = GetParam().half});
  double first = 0, last = 0;
  for (std::uint64_t step = 0; step < 60; ++step) {
    const Tensor loss = loss_of(model, make_batch(step % 10));
    precision.backward(loss);
    EXPECT_TRUE(precision.step().applied);
    (step < 10 ? first : last) = loss.item();
  }
  EXPECT_LT(last, 0.6 * first);
}

TEST_P(TrainingRun, AnOverflowSkipsNamesHalvesAndTouchesNothing) {
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  Amp precision =
      initialize(model, optimizer, {.opt_level = GetParam().level, .half_dtype = GetParam().half});
  model.eval();  // running statistics would take the inf in
  for (std::uint64_t step = 0; step < 3; ++step)
    test::expect_applied(train_step(model, precision, make_batch(step)));
  const auto before = everything(model, optimizer);
  const double scale = precision.loss_scale();

  Batch bad = make_batch(9);
  test::set_element(bad.x, 5, std::numeric_limits<double>::infinity());
  const optim::StepResult result = train_step(model, precision, bad);
  EXPECT_FALSE(result.applied);
  EXPECT_FALSE(result.culprit.empty());
  EXPECT_THAT(result.reason, HasSubstr(" in the gradient of " + result.culprit + " ("));
  EXPECT_EQ(everything(model, optimizer), before);
  EXPECT_EQ(optimizer.steps(), 3);
  if (precision.options().dynamic_loss_scale) {
    EXPECT_EQ(scale, 65536.0);
    EXPECT_EQ(precision.loss_scale(), 32768.0);
    EXPECT_THAT(result.reason, HasSubstr("; loss scale 65536 -> 32768"));
  } else {
    EXPECT_EQ(precision.loss_scale(), scale);
    EXPECT_THAT(result.reason, HasSubstr("; loss scale stays 1 (static)"));
  }
  EXPECT_TRUE(train_step(model, precision, make_batch(10)).applied);
}

INSTANTIATE_TEST_SUITE_P(Levels, TrainingRun, testing::ValuesIn(all_levels()), level_name);

TEST(AmpStep, O2EqualsHandWrittenMasterWeightsBitForBit) {
  for (const DType half : kHalves) {
    const double scale = 256.0, lr = 1e-2;
    nn::Sequential model = make_model(), by_hand = make_model();
    optim::FusedAdam optimizer(model.parameters(), {.lr = lr, .weight_decay = 0.1});
    Amp precision = initialize(
        model, optimizer, {.opt_level = OptLevel::O2, .half_dtype = half, .loss_scale = scale});

    // Batch norm stays f32; every other weight is the half rounding of an f32 master.
    struct Weight {
      Tensor parameter, master, m, v;
    };
    std::vector<Weight> weights;
    for (NamedTensor entry : by_hand.parameters()) {
      const Tensor exact = Tensor::from(values(entry.tensor), entry.tensor.shape(), DType::f32);
      if (entry.name[0] != '1') {
        entry.tensor.set_data(Tensor::from(values(exact), exact.shape(), half));
      }
      weights.push_back(
          {entry.tensor, exact, Tensor::zeros(exact.shape()), Tensor::zeros(exact.shape())});
    }
    for (std::uint64_t step = 0; step < 20; ++step) {
      const Batch batch = make_batch(step);
      EXPECT_TRUE(train_step(model, precision, batch).applied);

      const Tensor y = autograd::to(by_hand(autograd::to(batch.x, half)), DType::f32);
      autograd::backward(autograd::affine(autograd::cross_entropy(y, batch.labels), scale, 0.0));
      for (Weight& w : weights) {
        std::vector<double> unscaled = values(w.parameter.grad());
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
    const NamedTensors parameters = model.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& tensor = parameters[i].tensor;
      EXPECT_EQ(values(tensor), values(weights[i].parameter)) << parameters[i].name;
      if (kernels::MasterWeight::exists(tensor)) {
        EXPECT_EQ(values(kernels::MasterWeight::of(tensor)->tensor()), values(weights[i].master));
      }
    }
  }
}

TEST(AmpStep, TheLossIsScaledInF32) {
  nn::Sequential model = make_model();
  optim::FusedSGD optimizer(model.parameters(), {});
  const Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2});
  const Tensor loss = Tensor::full({}, 100.0, DType::f16);
  const Tensor scaled = precision.scale_loss(loss).tensor();
  EXPECT_EQ(scaled.dtype(), DType::f32);
  EXPECT_EQ(scaled.item(), 6553600.0);
  EXPECT_THROW((void)precision.scale_loss(Tensor()), core::InvalidArgument);
  EXPECT_THROW((void)precision.scale_loss(Tensor::zeros({2})), core::InvalidArgument);
  EXPECT_THROW((void)precision.scale_loss(Tensor::zeros({}, DType::i64)), core::InvalidArgument);
}

TEST(AmpStep, ADifferentScaleDoesNotChangeF32Training) {
  std::vector<std::vector<double>> results[2];
  for (const int i : {0, 1}) {
    nn::Sequential model = make_model();
    optim::FusedAdam optimizer(model.parameters());
    Amp precision = initialize(model, optimizer,
                               {.opt_level = OptLevel::O0, .loss_scale = i == 0 ? 1.0 : 1024.0});
    for (std::uint64_t step = 0; step < 5; ++step)
      test::expect_applied(train_step(model, precision, make_batch(step)));
    results[i] = everything(model, optimizer);
  }
  EXPECT_EQ(results[0], results[1]);  // powers of two are exact
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
    EXPECT_TRUE(split_precision.step({.gradient_scale = 0.5}).applied);
    const Batch both{autograd::concat({a.x, b.x}), autograd::concat({a.labels, b.labels})};
    EXPECT_TRUE(train_step(whole, whole_precision, both).applied);
    const double tolerance = level == OptLevel::O0 ? 1e-6 : 2e-3;
    for (std::size_t i = 0; i < 2; ++i) {
      test::expect_close(split.parameters()[i].tensor, values(whole.parameters()[i].tensor),
                         tolerance, tolerance);
    }
  }
}

TEST(AmpStep, ClipsTheUnscaledGradient) {
  nn::Sequential model = make_model();
  optim::FusedSGD optimizer(model.parameters(), {});
  Amp precision =
      initialize(model, optimizer, {.opt_level = OptLevel::O2, .max_gradient_norm = 1e-3});
  nn::Sequential plain = make_model();
  optim::FusedSGD plain_optimizer(plain.parameters(), {});
  Amp plain_precision = initialize(plain, plain_optimizer, {.opt_level = OptLevel::O0});
  const optim::StepResult clipped = train_step(model, precision, make_batch(1));
  const optim::StepResult free = train_step(plain, plain_precision, make_batch(1));
  EXPECT_NEAR(clipped.gradient_norm, free.gradient_norm, 1e-2 * free.gradient_norm);
  EXPECT_NEAR(clipped.clip_coefficient, 1e-3 / (clipped.gradient_norm + 1e-6), 1e-9);
  EXPECT_EQ(free.clip_coefficient, 1.0);
}

TEST(AmpStep, RemainderMastersTrainTheSameTruth) {
  std::vector<std::vector<double>> truths[2];
  for (const auto storage : {optim::MasterStorage::f32, optim::MasterStorage::remainder}) {
    nn::Sequential model = make_model();
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
    optimizer.set_state_options({.masters = storage});
    Amp precision =
        initialize(model, optimizer, {.opt_level = OptLevel::O2, .half_dtype = DType::bf16});
    for (std::uint64_t step = 0; step < 20; ++step)
      test::expect_applied(train_step(model, precision, make_batch(step)));
    const bool remainder = storage == optim::MasterStorage::remainder;
    EXPECT_EQ(test::kept_as(model.parameters()[0].tensor), storage);
    for (const auto& [name, tensor] : model.parameters()) {
      truths[remainder].push_back(values(kernels::master_value(tensor)));
    }
    precision.release();
    for (std::size_t i = 0; i < truths[remainder].size(); ++i) {
      EXPECT_EQ(values(model.parameters()[i].tensor), truths[remainder][i]);
    }
  }
  EXPECT_EQ(truths[0], truths[1]);
  nn::Sequential model = make_model();
  optim::FusedAdam optimizer(model.parameters());
  optimizer.set_state_options({.masters = optim::MasterStorage::remainder});
  EXPECT_THROW(initialize(model, optimizer, {.opt_level = OptLevel::O2}), core::InvalidArgument);
  EXPECT_EQ(model.parameters()[0].tensor.dtype(), DType::f32);
}

TEST(AmpStep, TwoHandlesSideBySideDoNotSeeEachOther) {
  const auto run = [](bool interleaved) {
    nn::Sequential first = make_model(1), second = make_model(2);
    optim::FusedAdam first_optimizer(first.parameters()), second_optimizer(second.parameters());
    Amp a = initialize(first, first_optimizer, {.opt_level = OptLevel::O2});
    Amp b = initialize(second, second_optimizer,
                       {.opt_level = OptLevel::O1, .half_dtype = DType::bf16});
    Batch bad = make_batch(50);
    test::set_element(bad.x, 0, std::numeric_limits<double>::quiet_NaN());
    for (std::uint64_t step = 0; step < 6; ++step) {
      const bool applies = step != 3;
      EXPECT_EQ(train_step(first, a, applies ? make_batch(step) : bad).applied, applies);
      if (interleaved) test::expect_applied(train_step(second, b, make_batch(step)));
    }
    for (std::uint64_t step = 0; step < 6 && !interleaved; ++step)
      test::expect_applied(train_step(second, b, make_batch(step)));
    EXPECT_EQ(a.loss_scale(), 32768.0);
    EXPECT_EQ(b.loss_scale(), 1.0);
    auto all = everything(second, second_optimizer);
    all.push_back(values(first.parameters()[0].tensor));
    return all;
  };
  EXPECT_EQ(run(true), run(false));
}

}  // namespace
}  // namespace cairn::amp
