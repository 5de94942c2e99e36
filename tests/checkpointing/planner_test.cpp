// Plans of real models: their predictions against steps.
#include "cairn/checkpointing/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "checkpointing/temporary_folder.h"
#include "support/tensors.h"

namespace cairn::checkpointing::planner {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<std::vector<double>>;

class Mlp : public nn::Module {
 public:
  Mlp(std::int64_t width, std::int64_t hidden)
      : up_(add_module("up", nn::Linear(width, hidden))),
        down_(add_module("down", nn::Linear(hidden, width))) {}
  std::string kind() const override { return "Mlp"; }
  Tensor forward(const Tensor& x) override {
    return x + (*down_)(autograd::dropout(autograd::gelu((*up_)(x)), 0.1));
  }

 private:
  std::shared_ptr<nn::Linear> up_, down_;
};

/// The end of a chain: its loss.
class MeanSquare : public nn::Module {
 public:
  std::string kind() const override { return "MeanSquare"; }
  Tensor forward(const Tensor& x) override { return autograd::mean(x * x); }
};

nn::Sequential unequal_chain() {
  manual_seed(1);
  nn::Sequential model;
  for (const int hidden : {256, 64, 512, 128, 64, 512, 256, 128}) {
    model.add(Mlp(64, hidden));
    model.add(nn::LayerNorm(64));
  }
  model.add(MeanSquare());
  return model;
}

struct Step {
  Values gradients;
  std::size_t peak = 0;
};
Step step_of(nn::Sequential& model, const Tensor& x) {
  Step step;
  manual_seed(3);
  core::reset_peak_memory(core::default_device());
  autograd::backward(model(x));
  step.peak = core::memory_stats(core::default_device()).peak_total;
  for (const auto& p : model.parameters()) step.gradients.push_back(p.tensor.grad().to_vector());
  model.clear_grad();
  return step;
}

TEST(Planner, MeetsEveryBudgetWithTheBitsOfPlainTraining) {
  nn::Sequential model = unequal_chain();
  const Tensor x = test::normal_tensor({512, 64}, 2);
  const Step plain = step_of(model, x);
  const std::size_t standing = core::memory_stats(core::default_device()).current_total;
  for (const double share : {1.02, 0.8, 0.6, 0.52}) {
    const auto budget = static_cast<std::size_t>(share * static_cast<double>(plain.peak));
    const RecomputationPlan plan =
        plan_recomputation(model, x, budget, {.tensors_only = true, .repeats = 1});
    EXPECT_EQ(core::memory_stats(core::default_device()).current_total, standing);
    plan.apply(model);
    const Step step = step_of(model, x);
    model.set_runner({});
    EXPECT_EQ(step.gradients, plain.gradients) << plan.report();
    EXPECT_LE(step.peak, budget) << plan.report();
    EXPECT_LE(plan.peak_bytes(), budget);
    const double predicted = static_cast<double>(plan.peak_bytes());
    EXPECT_NEAR(static_cast<double>(step.peak) / predicted, 1.0, 0.05) << plan.report();
  }
}

TEST(Planner, ARefusedBudgetNamesTheLeastThatDoesAndLeavesTheModelAsItWas) {
  nn::Sequential model = unequal_chain();
  const Tensor x = test::normal_tensor({512, 64}, 2);
  const auto plan = [&](std::size_t budget) {
    return plan_recomputation(model, x, budget, {.tensors_only = true, .repeats = 1});
  };
  const std::string message = message_of<core::OutOfMemory>([&] { (void)plan(1000); });
  const std::string start = "expected a budget of at least ";
  ASSERT_THAT(message, HasSubstr(start));
  EXPECT_FALSE(model.runner());
  const std::size_t least = std::stoull(message.substr(message.find(start) + start.size()));
  EXPECT_EQ(plan(least).peak_bytes(), least);
  EXPECT_THROW((void)plan(least - 1), core::OutOfMemory);
}

// The second backward adds to gradients that stand from the start.
TEST(Planner, CountsGradientsThatAccumulate) {
  manual_seed(1);
  nn::Sequential model;
  for (int i = 0; i < 4; ++i) model.add(nn::Linear(128, 128));
  model.add(MeanSquare());
  const Tensor x = test::normal_tensor({16, 128}, 2);
  const RecomputationPlan plan =
      plan_recomputation(model, x, SIZE_MAX, {.accumulates = true, .repeats = 1});
  plan.apply(model);
  autograd::backward(model(x));
  core::reset_peak_memory(core::default_device());
  autograd::backward(model(x));
  const std::size_t peak = core::memory_stats(core::default_device()).peak_total;
  EXPECT_LE(peak, plan.peak_bytes());
  EXPECT_GE(static_cast<double>(peak), 0.95 * static_cast<double>(plan.peak_bytes()));
}

class AttentionBlock : public nn::Module {
 public:
  explicit AttentionBlock(std::int64_t width)
      : norm_(add_module("norm", nn::LayerNorm(width))),
        attention_(add_module("attention", nn::MultiheadAttention(width, 4, {.dropout = 0.1}))),
        mlp_(add_module("mlp", Mlp(width, 4 * width))) {}
  std::string kind() const override { return "AttentionBlock"; }
  Tensor forward(const Tensor& x) override { return (*mlp_)(x + (*attention_)((*norm_)(x))); }

 private:
  std::shared_ptr<nn::LayerNorm> norm_;
  std::shared_ptr<nn::MultiheadAttention> attention_;
  std::shared_ptr<Mlp> mlp_;
};

nn::Sequential attention_chain() {
  manual_seed(1);
  nn::Sequential model;
  for (int i = 0; i < 5; ++i) model.add(AttentionBlock(64));
  model.add(MeanSquare());
  return model;
}

std::vector<Segment> blocks_of(nn::Sequential& model) {
  std::vector<Segment> blocks;
  for (std::size_t i = 0; i < model.size(); ++i) {
    blocks.push_back([&module = model.at(i)](const Tensor& x) { return module(x); });
  }
  return blocks;
}

TEST(Planner, EveryWayToKeepABlockInPartHasThePredictedPeakAndTheBitsOfPlainTraining) {
  nn::Sequential model = attention_chain();
  const std::int64_t samples = core::default_device().is_cuda() ? 4 : 8;  // simulated: slow
  const Tensor x = test::normal_tensor({samples, 64, 64}, 2);
  const Step plain = step_of(model, x);
  const std::size_t standing = core::memory_stats(core::default_device()).current_total;
  const RecomputationPlan all = plan_recomputation(model, x, SIZE_MAX, {.repeats = 1});
  std::size_t most = 0, smallest = SIZE_MAX;
  for (const BlockProfile& block : all.profile()) most = std::max(most, block.selective.size());
  ASSERT_GE(most, 2u);  // as many as operations that took some of the time
  for (std::size_t way = 0; way < most; ++way) {
    for (const bool nested : {false, true}) {
      Schedule schedule;
      for (std::size_t i = 0; i < model.size(); ++i) {
        const auto& ways = all.profile()[i].selective;
        const KeptResults results = way < ways.size() ? ways[way].results : nullptr;
        schedule.push_back({i, i + 1, {}, false, results});
      }
      // The first three once more, in a segment.
      if (nested) {
        const Schedule inner(schedule.begin(), schedule.begin() + 3);
        schedule.erase(schedule.begin(), schedule.begin() + 2);
        schedule.front() = {0, 3, inner};
      }
      const RecomputationPlan plan(blocks_of(model), all.profile(), schedule, standing);
      plan.apply(model);
      const Step step = step_of(model, x);
      model.set_runner({});
      ASSERT_EQ(step.gradients, plain.gradients) << plan.report();
      EXPECT_LE(step.peak, plan.peak_bytes()) << plan.report();
      EXPECT_GE(static_cast<double>(step.peak), 0.95 * static_cast<double>(plan.peak_bytes()))
          << plan.report();
      smallest = std::min(smallest, step.peak);
    }
  }
  EXPECT_LT(smallest - standing, (plain.peak - standing) / 2);
}

TEST(Planner, ReportsWhichResultsAreKept) {
  std::vector<BlockProfile> profile(4);
  const auto keeps = [](std::vector<SegmentOperation> results) {
    return std::make_shared<const std::vector<SegmentOperation>>(std::move(results));
  };
  const KeptResults both = keeps({{"self_attention", 0}, {"linear", 1}}), none = keeps({});
  for (BlockProfile& block : profile) block.selective = {{{}, none}, {{}, both}};
  const Schedule schedule{
      {0, 1, {}, false, both}, {1, 2, {}, false, none}, {2, 3}, {3, 4, {}, false, both}};
  const RecomputationPlan plan(std::vector<Segment>(4), profile, schedule, 0);
  EXPECT_THAT(plan.report(),
              HasSubstr("blocks [0]a [1] 2 [3]a (a: self_attention 0, linear 1): peak"));
}

TEST(Planner, OffloadsWhereThatIsFasterThanToRunAgain) {
  // The hidden layer is dear to run again, and what it keeps is most of the memory.
  manual_seed(1);
  nn::Sequential model;
  for (int i = 0; i < 3; ++i) {
    model.add(nn::Linear(256, 256));
    model.add(nn::GELU());
  }
  model.add(MeanSquare());
  const Tensor x = test::normal_tensor({1024, 256}, 2);
  const Step plain = step_of(model, x);
  const TemporaryFolder folder;
  const PlanOptions options{
      .tensors_only = true, .repeats = 2, .offload = OffloadOptions{.folder = folder.string()}};
  bool offloaded = false;
  for (const double share : {0.9, 0.8, 0.7}) {
    const auto budget = static_cast<std::size_t>(share * static_cast<double>(plain.peak));
    const RecomputationPlan plan = plan_recomputation(model, x, budget, options);
    plan.apply(model);
    const Step step = step_of(model, x);
    model.set_runner({});
    EXPECT_EQ(step.gradients, plain.gradients) << plan.report();
    EXPECT_LE(step.peak, plan.peak_bytes()) << plan.report();
    EXPECT_GE(static_cast<double>(step.peak), 0.9 * static_cast<double>(plan.peak_bytes()));
    offloaded = offloaded || plan.report().find('(') < plan.report().find(':');
  }
  // Which is faster is the machine's business; that offload takes less memory is not.
  const RecomputationPlan plan = plan_recomputation(model, x, SIZE_MAX, options);
  EXPECT_TRUE(plan.profile()[0].offloaded.has_value());
  RecordProperty("offloaded", offloaded);
}

TEST(Planner, SeesWhatAmpPutsAroundAModel) {
  for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2}) {
    nn::Sequential model = unequal_chain();
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.1});
    amp::Amp precision =
        amp::initialize(model, optimizer, {.opt_level = level, .half_dtype = DType::bf16});
    const Tensor x = test::normal_tensor({512, 64}, 2);
    const Step plain = step_of(model, x);
    const std::size_t budget = plain.peak * 7 / 10;
    const RecomputationPlan plan =
        plan_recomputation(model, x, budget, {.tensors_only = true, .repeats = 1});
    plan.apply(model);
    const Step step = step_of(model, x);
    EXPECT_EQ(step.gradients, plain.gradients) << plan.report();
    EXPECT_LE(step.peak, budget) << plan.report();
    EXPECT_GE(static_cast<double>(step.peak), 0.9 * static_cast<double>(plan.peak_bytes()));
  }
}

TEST(Planner, LeavesGeneratorAndStatisticsAloneAndRefusesPendingGradients) {
  nn::Sequential model;
  model.add(nn::Linear(8, 8));
  model.add(nn::BatchNorm1d(8));
  model.add(nn::Dropout(0.5));
  const Tensor x = test::normal_tensor({16, 8}, 2);
  manual_seed(4);
  const Tensor mean = model.buffers()[0].tensor;
  const auto before = mean.to_vector();
  (void)plan_recomputation(model, x, SIZE_MAX);
  EXPECT_EQ(mean.to_vector(), before);
  EXPECT_EQ(Generator::current().offset(), 0u);
  autograd::backward(autograd::sum(model(x)));
  EXPECT_THAT(
      message_of<core::InvalidArgument>([&] { (void)plan_recomputation(model, x, SIZE_MAX); }),
      HasSubstr("got one in '0.weight'"));
}

TEST(Planner, GivesBackWhatMeasuringTook) {
  nn::Sequential model(nn::Linear(256, 1024), nn::GELU(), nn::Linear(1024, 256));
  const Tensor x = test::normal_tensor({1024, 256}, 2);
  const Device device = core::default_device();
  core::release_cached_memory(device);
  const std::size_t before = core::memory_stats(device).reserved;
  (void)plan_recomputation(model, x, SIZE_MAX, {.repeats = 1});  // 4 MiB a block, at least
  EXPECT_LE(core::memory_stats(device).reserved, before + (std::size_t{2} << 20));
}

// Beside other programs, threads that spin keep the processors from those that they wait for.
TEST(Planner, MeasuresWithThreadsThatSleepWhileTheyWait) {
  if (core::num_threads() == 1) GTEST_SKIP() << "one thread waits for nobody";
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  core::parallel_for(1000, 1, [](std::int64_t, std::int64_t) {});  // starts the usual ones
  const auto before = threads();
  std::ptrdiff_t most = 0;
  const Segment block = [&](const Tensor& x) {
    most = std::max<std::ptrdiff_t>(most, threads());
    return autograd::sum(x);
  };
  const Tensor x = test::normal_tensor({4, 8}, 2).set_requires_grad(true);
  (void)plan_recomputation(std::vector<Segment>{block}, x, SIZE_MAX);
  EXPECT_GT(most, before);
}

TEST(Planner, LongChainsAreCutIntoNeighbours) {
  const Tensor x = test::normal_tensor({64, 16}, 2).set_requires_grad(true);
  std::vector<Segment> blocks(300, [](const Tensor& y) { return autograd::tanh(y); });
  blocks.push_back([](const Tensor& y) { return autograd::sum(y); });
  const std::size_t standing = core::memory_stats(core::default_device()).current_total;
  autograd::backward(plan_recomputation(blocks, x, SIZE_MAX, {.repeats = 1}).run(x));
  const auto plain = x.grad().to_vector();
  for (const std::size_t activations : {20, 40, 150}) {
    Tensor(x).clear_grad();
    const std::size_t budget = standing + activations * x.nbytes();
    const RecomputationPlan plan =
        plan_recomputation(blocks, x, budget, {.tensors_only = true, .repeats = 1});
    EXPECT_EQ(plan.schedule().back().end, blocks.size());
    core::reset_peak_memory(core::default_device());
    autograd::backward(plan.run(x));
    const std::size_t peak = core::memory_stats(core::default_device()).peak_total;
    EXPECT_EQ(x.grad().to_vector(), plain) << plan.report();
    EXPECT_LE(peak, budget) << plan.report();
    EXPECT_LE(peak, plan.peak_bytes()) << plan.report();
    EXPECT_GE(static_cast<double>(peak), 0.95 * static_cast<double>(plan.peak_bytes()));
  }
}

}  // namespace
}  // namespace cairn::checkpointing::planner
