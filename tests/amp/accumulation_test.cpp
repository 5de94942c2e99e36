// optim::Accumulation under amp: uneven micro-batches train as the whole batch does, at every
// level; an overflow in one of them skips the window's one step.
#include "cairn/optim/accumulation.h"

#include "support.h"

namespace cairn::amp {
namespace {

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
optim::StepResult window(nn::Module& model, Amp& precision, optim::Accumulation& accumulation,
                         const Batch& batch, int bad = -1) {
  std::int64_t begin = 0;
  for (std::size_t k = 0; k < kCounts.size(); ++k) {
    const auto micro = accumulation.begin(kCounts[k]);
    EXPECT_EQ(micro.last(), k + 1 == kCounts.size());
    Tensor loss = loss_of(model, part_of(batch, begin, kCounts[k]));
    if (static_cast<int>(k) == bad) loss = autograd::affine(loss, 1e8, 0.0);
    precision.backward(loss, {.weight = micro.weight()});
    begin += kCounts[k];
  }
  return precision.step({.gradient_scale = accumulation.finish()});
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
  nn::Sequential parts = plain_model(), whole = plain_model();
  optim::FusedSGD parts_optimizer(parts.parameters(), {.lr = 0.1, .momentum = 0.9});
  optim::FusedSGD whole_optimizer(whole.parameters(), {.lr = 0.1, .momentum = 0.9});
  Options options{.opt_level = level.level, .half_dtype = level.half};
  options.scaler.init_scale = 4096.0;  // sums of four micro-batches stay within f16
  Amp parts_precision = initialize(parts, parts_optimizer, options);
  Amp whole_precision = initialize(whole, whole_optimizer, options);
  optim::Accumulation accumulation({.steps = static_cast<std::int64_t>(kCounts.size())});
  for (std::uint64_t step = 0; step < 10; ++step) {
    const Batch batch = make_batch(step);
    const auto a = window(parts, parts_precision, accumulation, batch);
    const auto b = train_step(whole, whole_precision, batch);
    ASSERT_EQ(a.applied, b.applied) << a.reason << b.reason;
    EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 0.02 * b.gradient_norm);
  }
  for (std::size_t p = 0; p < parts.parameters().size(); ++p) {
    test::expect_close(exact(parts.parameters()[p].tensor), exact(whole.parameters()[p].tensor), 0,
                       level.tolerance);
  }
}

TEST(AmpAccumulationOverflow, InAnyMicroBatchSkipsTheWindowOnce) {
  for (int bad = 0; bad < 4; ++bad) {
    nn::Sequential model = plain_model();
    optim::FusedAdam optimizer(model.parameters());
    Amp precision = initialize(model, optimizer, {.opt_level = OptLevel::O2});
    optim::Accumulation accumulation({.steps = 4});
    const auto before = everything(model, optimizer);
    EXPECT_FALSE(window(model, precision, accumulation, make_batch(1), bad).applied);
    EXPECT_EQ(everything(model, optimizer), before);
    EXPECT_EQ(precision.loss_scale(), 32768.0);
    EXPECT_TRUE(window(model, precision, accumulation, make_batch(2)).applied);
    EXPECT_EQ(optimizer.steps(), 1);
  }
}

}  // namespace
}  // namespace cairn::amp
