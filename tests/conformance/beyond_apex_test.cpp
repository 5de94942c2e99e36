// What Apex's own tests left out, of amp: the round trip of its state, an O2 resume with Adam,
// overflow under a static scale, the bounds and the growth of the scale, delayed unscaling, and
// scales that are equal on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/distributed.h"
#include "support/state.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::conformance {
namespace {

using amp::OptLevel;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Trained {
  explicit Trained(const amp::Options& options, const optim::StateOptions& storage = {},
                   std::uint64_t seed = 1) {
    manual_seed(seed);
    model = std::make_unique<nn::Sequential>(nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 4));
    optimizer = std::make_unique<optim::FusedAdam>(
        model->parameters(), optim::AdamOptions{.lr = 1e-2, .weight_decay = 0.1});
    optimizer->set_state_options(storage);
    precision = std::make_unique<amp::Amp>(amp::initialize(*model, *optimizer, options));
  }
  Tensor loss(std::uint64_t step, double factor = 1.0) const {
    const Tensor x = test::random_tensor({12, 8}, DType::f32, core::default_device(), step);
    const Tensor target =
        test::random_tensor({12, 4}, DType::f32, core::default_device(), 1000 + step);
    const Tensor y = autograd::to((*model)(x), DType::f32);
    return autograd::affine(autograd::mse_loss(y, target), factor, 0.0);
  }
  optim::StepResult step(std::uint64_t at, double factor = 1.0) {
    precision->backward(loss(at, factor));
    return precision->step();
  }
  std::vector<std::vector<double>> truths() const {
    std::vector<std::vector<double>> all;
    for (const auto& [name, tensor] : model->parameters()) {
      all.push_back(tensor.to_vector<double>());
      all.push_back(kernels::master_value(tensor).to_vector<double>());
    }
    return all;
  }
  std::unique_ptr<nn::Sequential> model;
  std::unique_ptr<optim::FusedAdam> optimizer;
  std::unique_ptr<amp::Amp> precision;
};

TEST(BeyondApex, AmpStateMakesTheRoundTrip) {
  const amp::Options options{.opt_level = OptLevel::O2, .num_losses = 3};
  Trained saved(options), loaded(options);
  for (int id = 0; id < 3; ++id) {
    for (int k = 0; k < id; ++k) {
      saved.precision->backward(saved.loss(1, kInf), {.loss_id = id});
      EXPECT_FALSE(saved.precision->step().applied);
    }
    saved.precision->backward(saved.loss(2), {.loss_id = id});
    EXPECT_TRUE(saved.precision->step().applied);
  }
  loaded.precision->load_state_dict(test::snapshot(saved.precision->state_dict()));
  for (int id = 0; id < 3; ++id) {
    EXPECT_EQ(loaded.precision->loss_scale(id), 65536.0 / (1 << id));
    EXPECT_EQ(loaded.precision->scaler(id).state_dict().integer("unskipped"), 1);
  }
}

TEST(BeyondApex, O2WithAdamResumesBitForBit) {
  const optim::StateOptions f32{},
      compact{.moments = DType::bf16, .masters = optim::MasterStorage::remainder};
  for (const auto& [half, storage] :
       {std::pair{DType::f16, f32}, std::pair{DType::bf16, f32}, std::pair{DType::bf16, compact}}) {
    const amp::Options options{
        .opt_level = OptLevel::O2, .half_dtype = half, .scaler = {.init_scale = 1024}};
    Trained unbroken(options, storage);
    for (std::uint64_t at = 0; at < 7; ++at) test::expect_applied(unbroken.step(at));
    const StateDict model = test::snapshot(unbroken.model->state_dict()),
                    optimizer = test::snapshot(unbroken.optimizer->state_dict()),
                    precision = test::snapshot(unbroken.precision->state_dict());
    Trained resumed(options, storage, 99);
    resumed.model->load_state_dict(model);
    resumed.optimizer->load_state_dict(optimizer);
    resumed.precision->load_state_dict(precision);
    for (std::uint64_t at = 7; at < 27; ++at) {
      test::expect_applied(unbroken.step(at));
      test::expect_applied(resumed.step(at));
      ASSERT_EQ(unbroken.truths(), resumed.truths()) << half << " step " << at;
    }
  }
}

TEST(BeyondApex, AStaticScaleSkipsWhatOverflows) {
  Trained run({.opt_level = OptLevel::O2, .loss_scale = 128});
  const auto before = run.truths();
  const optim::StepResult result = run.step(0, kInf);
  EXPECT_FALSE(result.applied);
  EXPECT_THAT(result.reason, HasSubstr("loss scale stays 128 (static)"));
  EXPECT_EQ(run.truths(), before);
}

TEST(BeyondApex, TheScaleStaysWithinItsBounds) {
  amp::Options options{.opt_level = OptLevel::O2};
  options.scaler = {.init_scale = 32, .growth_interval = 1, .min_scale = 8, .max_scale = 64};
  Trained run(options);
  std::vector<double> scales;
  for (const double factor : {kInf, kInf, kInf, 1.0, 1.0, 1.0, 1.0}) {
    EXPECT_EQ(run.step(0, factor).applied, factor == 1.0);
    scales.push_back(run.precision->loss_scale());
  }
  EXPECT_THAT(scales, testing::ElementsAre(16, 8, 8, 16, 32, 64, 64));
}

TEST(BeyondApex, TheScaleGrowsAfter2000CleanSteps) {
  Trained run({.opt_level = OptLevel::O2, .scaler = {.init_scale = 1024}});
  for (int k = 0; k < 1999; ++k) test::expect_applied(run.step(0));
  EXPECT_EQ(run.precision->loss_scale(), 1024.0);
  test::expect_applied(run.step(0));
  EXPECT_EQ(run.precision->loss_scale(), 2048.0);
}

TEST(BeyondApex, DelayedUnscalingAddsUp) {
  const amp::Options options{.opt_level = OptLevel::O2, .scaler = {.init_scale = 1024}};
  Trained delayed(options), whole(options);
  delayed.precision->backward(delayed.loss(1), {.delay_unscale = true});
  delayed.precision->backward(delayed.loss(2));
  const optim::StepResult sum = delayed.precision->step();
  whole.precision->backward(autograd::add(whole.loss(1), whole.loss(2)));
  const optim::StepResult once = whole.precision->step();
  EXPECT_TRUE(sum.applied && once.applied);
  EXPECT_GT(once.gradient_norm, 0.1);
  EXPECT_NEAR(sum.gradient_norm, once.gradient_norm, 2e-3 * once.gradient_norm);
}

TEST(BeyondApex, LossScalesAreEqualOnAllRanks) {
  constexpr int kRanks = 4;
  auto groups = parallel::ProcessGroup::in_process(kRanks);
  std::vector<std::vector<double>> scales(kRanks);
  std::vector<std::string> reasons(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      // No reduction of gradients: only the ranks' agreement keeps them together.
      Trained run({.opt_level = OptLevel::O2, .world = groups[r].world()});
      for (int step = 0; step < 8; ++step) {
        const bool bad = step == 2 * rank;  // another rank overflows in every second step
        const optim::StepResult result = run.step(1, bad ? kInf : 1.0);
        EXPECT_EQ(result.applied, step % 2 == 1);
        if (step == 4) reasons[r] = result.reason;
        scales[r].push_back(run.precision->loss_scale());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_EQ(scales[static_cast<std::size_t>(rank)], scales[0]);
    EXPECT_EQ(reasons[static_cast<std::size_t>(rank)], reasons[0]);
  }
  EXPECT_EQ(scales[0].back(), 65536.0 / 16);
  EXPECT_THAT(reasons[0], HasSubstr(" on rank 2"));
}

}  // namespace
}  // namespace cairn::conformance
