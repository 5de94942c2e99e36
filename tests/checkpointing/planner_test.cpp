// The planner: its programme against all schedules of small chains, its predictions against steps.
#include "cairn/checkpointing/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <limits>
#include <random>
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
#include "plan/chain_schedule.h"
#include "plan/merged_chain.h"
#include "plan/schedule_choice.h"
#include "support/tensors.h"

namespace cairn::checkpointing::planner {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<std::vector<double>>;
constexpr double kNever = std::numeric_limits<double>::infinity();

// ---- What blocks take together, counted by hand

TEST(ChainProgramme, AViewHoldsTheMemoryOfItsInput) {
  std::vector<BlockProfile> chain(3);
  chain[0].output = chain[0].light_peak = chain[0].forward_peak = 100;
  chain[1].gradient = 100;  // a view of the 100
  chain[2].output = chain[2].gradient = 1;
  chain[2].forward_peak = 50;
  chain[2].saves_input = true;
  chain[2].backward_peak = 101;  // the gradients of its input and of its result
  EXPECT_EQ(simulate(chain, plain_schedule(3)).peak, 2 * 100u + 2 * 1);
}

TEST(ChainProgramme, AReplayEndsWithTheLastTensorThatItsLastBlockKeeps) {
  std::vector<BlockProfile> chain(2);
  chain[0].forward_seconds = 4;
  chain[0].tail_seconds = 3;
  chain[0].output = chain[0].gradient = 1;
  chain[0].light_peak = 2;
  chain[0].forward_peak = 100;
  chain[0].replay_peak = 20;
  chain[0].lead = 7;
  chain[1].output = chain[1].gradient = 1;
  chain[1].forward_peak = 10;
  chain[1].replay_peak = 5;  // runs whole: it is in no replay
  const ScheduleCost kept = simulate(chain, {{0, 1}, {1, 2}});
  EXPECT_EQ(kept.peak, 100u);
  EXPECT_EQ(kept.seconds, 4);
  const ScheduleCost replayed = simulate(chain, {{0, 1, {{0, 1}}}, {1, 2}});
  // Beside the chain's result, two gradients, and what the backward has made.
  EXPECT_EQ(replayed.peak, 3 + 7 + 20u);
  EXPECT_EQ(replayed.seconds, 4 + 1);
}

TEST(MergedChain, NeighboursTakeWhatTheyTakeOneAfterTheOther) {
  std::vector<BlockProfile> chain(2);
  chain[0].forward_seconds = 1;
  chain[0].backward_seconds = 2;
  chain[0].saved = 10;
  chain[0].output = 20;
  chain[0].light_peak = 100;
  chain[0].forward_peak = 200;
  chain[0].backward_peak = 50;
  chain[1].forward_seconds = 3;
  chain[1].backward_seconds = 4;
  chain[1].saved = 5;
  chain[1].output = 2;
  chain[1].light_peak = 90;
  chain[1].forward_peak = 40;
  chain[1].replay_peak = 31;
  chain[1].backward_peak = 60;
  const MergedChain merged(chain, 1);
  ASSERT_EQ(merged.blocks().size(), 1u);
  const BlockProfile& both = merged.blocks()[0];
  EXPECT_EQ(both.forward_seconds, 4);
  EXPECT_EQ(both.backward_seconds, 6);
  EXPECT_EQ(both.saved, 10u + 20 + 5);
  EXPECT_EQ(both.output, 2u);
  EXPECT_EQ(both.light_peak, 20u + 90);     // beside the first one's result
  EXPECT_EQ(both.forward_peak, 200u);       // the first one's
  EXPECT_EQ(both.replay_peak, 200u);        // which runs whole
  EXPECT_EQ(both.backward_peak, 30u + 60);  // beside all that the first keeps
}

// ---- An oracle: every schedule, written out and walked through

std::vector<BlockProfile> random_chain(std::mt19937& random, int n) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % (high - low + 1));
  };
  std::vector<BlockProfile> chain(static_cast<std::size_t>(n));
  for (BlockProfile& b : chain) {
    b.forward_seconds = draw(1, 9);
    b.backward_seconds = draw(1, 9);
    b.output = draw(1, 4);
    b.gradient = b.output;
    b.lead = draw(0, 3);
    b.saved = draw(0, 6);
    b.saves_output = true;
    b.light_peak = b.output + draw(0, 3);
    b.forward_peak = b.output + b.saved + draw(0, 3);
    b.replay_peak = draw(static_cast<int>(b.saved), static_cast<int>(b.forward_peak));
    b.backward_peak = b.output + b.saved + b.gradient + b.lead + draw(0, 5);
  }
  return chain;
}

// The same with blocks that may be offloaded, some for little and some for much time.
std::vector<BlockProfile> random_chain_with_offload(std::mt19937& random, int n) {
  std::vector<BlockProfile> chain = random_chain(random, n);
  for (BlockProfile& b : chain) {
    if (random() % 4 == 0) continue;
    b.offloaded = b;
    b.offloaded->forward_seconds += static_cast<double>(random() % 6);
    b.offloaded->backward_seconds += static_cast<double>(random() % 6);
    b.offloaded->saved = random() % (b.saved + 1);
    b.offloaded->backward_peak += random() % 3;
  }
  return chain;
}

// Blocks that may keep a part, for more or less time, and gradients that stay where the backward
// has been.
std::vector<BlockProfile> random_chain_with_ways(std::mt19937& random, int n) {
  std::vector<BlockProfile> chain = random_chain_with_offload(random, n);
  const auto below = [&](double limit) {
    return static_cast<double>(random() % static_cast<unsigned>(limit + 1));
  };
  for (BlockProfile& b : chain) {
    b.parameter_gradients = random() % 3;
    b.backward_peak += b.parameter_gradients;
    if (b.offloaded) b.offloaded->backward_peak += b.parameter_gradients;
    b.tail_seconds = below(b.forward_seconds);
    for (unsigned ways = random() % 3; ways > 0; --ways) {
      SelectiveBlock way{b, std::make_shared<const std::vector<SegmentOperation>>()};
      way.saved = random() % (b.saved + 1);
      way.forward_peak = b.output + way.saved + random() % 3;
      way.replay_peak = way.saved + random() % (b.output + 1);
      way.backward_seconds += below(5);
      way.tail_seconds = below(way.forward_seconds);
      b.selective.push_back(way);
    }
  }
  return chain;
}

// All schedules of the blocks s .. t; outside of segments, blocks may be offloaded.
std::vector<Schedule> all_schedules(const std::vector<BlockProfile>& chain, std::size_t s,
                                    std::size_t t) {
  if (s > t) return {{}};
  std::vector<Schedule> all;
  const auto add = [&](const SchedulePart& head) {
    for (const Schedule& rest : all_schedules(chain, head.end, t)) {
      Schedule schedule{head};
      schedule.insert(schedule.end(), rest.begin(), rest.end());
      all.push_back(schedule);
    }
  };
  add({s, s + 1});
  for (const SelectiveBlock& way : chain[s].selective) add({s, s + 1, {}, false, way.results});
  if (chain[s].offloaded && t + 1 == chain.size()) add({s, s + 1, {}, true});
  for (std::size_t end = s + 1; end <= t; ++end) {  // the last block's backward comes at once
    for (const Schedule& inner : all_schedules(chain, s, end - 1)) add({s, end, inner});
  }
  return all;
}

// The programme's model, plainly: what stands is a sum, each operation needs so much above it.
struct Walk {
  const std::vector<BlockProfile>& chain;
  std::size_t peak = 0;
  double seconds = 0;

  void need(std::size_t bytes) { peak = std::max(peak, bytes); }
  const KeptBlock& kept_as(const SchedulePart& part) const {
    const BlockProfile& block = chain[part.begin];
    for (const SelectiveBlock& way : block.selective) {
      if (way.results == part.results) return way;
    }
    return part.offloaded ? *block.offloaded : block;
  }
  // Of the parameters of the blocks from i on.
  std::size_t gradients_from(std::size_t i) const {
    std::size_t sum = 0;
    for (; i < chain.size(); ++i) sum += chain[i].parameter_gradients;
    return sum;
  }

  // A run of the schedule and the backward through it; `standing` without gradients, `gradient` of
  // the result and what else stands with it. A replay ends with the last tensor that is kept.
  void run(const Schedule& schedule, std::size_t standing, std::size_t gradient) {
    std::vector<std::size_t> before;
    const bool replayed = schedule.back().end < chain.size();
    if (replayed) seconds -= kept_as(schedule.back()).tail_seconds;
    gradient += gradients_from(schedule.back().end);
    for (const SchedulePart& part : schedule) {
      before.push_back(standing);
      if (part.inner.empty()) {
        const KeptBlock& b = kept_as(part);
        const bool ends = replayed && &part == &schedule.back();
        need(standing + gradient + (ends ? b.replay_peak : b.forward_peak));
        seconds += b.forward_seconds;
        standing += b.saved + chain[part.begin].output;
        continue;
      }
      for (std::size_t i = part.begin; i < part.end; ++i) {
        const std::size_t input = i > part.begin ? chain[i - 1].output : 0;
        need(standing + gradient + input + chain[i].light_peak);
        seconds += chain[i].forward_seconds;
      }
      standing += chain[part.end - 1].output;
    }
    for (std::size_t k = schedule.size(); k-- > 0;) {
      const SchedulePart& part = schedule[k];
      if (part.inner.empty()) {
        need(before[k] + kept_as(part).backward_peak + gradients_from(part.end));
        seconds += kept_as(part).backward_seconds;
      } else {
        const BlockProfile& last = chain[part.end - 1];
        run(part.inner, before[k], last.gradient + last.lead);
      }
    }
  }
};

bool offloads(const Schedule& schedule) {
  return std::any_of(schedule.begin(), schedule.end(),
                     [](const SchedulePart& part) { return part.offloaded; });
}
bool keeps_results(const Schedule& schedule) {
  return std::any_of(schedule.begin(), schedule.end(), [](const SchedulePart& part) {
    return part.results != nullptr || keeps_results(part.inner);
  });
}

TEST(ChainProgramme, IsTheBestOfAllSchedulesForEveryAmountOfMemory) {
  std::mt19937 random(7);
  int offloading = 0, selective = 0;
  for (int trial = 0; trial < 180; ++trial) {
    const int n = 1 + trial % (trial < 120 ? 6 : 5);
    const std::vector<BlockProfile> chain = trial < 60    ? random_chain(random, n)
                                            : trial < 120 ? random_chain_with_offload(random, n)
                                                          : random_chain_with_ways(random, n);
    const ChainProgramme programme(chain, 0);
    std::vector<Walk> walks;
    for (const Schedule& schedule : all_schedules(chain, 0, chain.size() - 1)) {
      walks.push_back({chain});
      walks.back().run(schedule, 0, 0);
    }
    for (std::size_t m = 0; m <= programme.steps(); ++m) {
      double best = kNever;
      for (const Walk& walk : walks) {
        if (walk.peak <= m) best = std::min(best, walk.seconds);
      }
      ASSERT_EQ(programme.seconds(m), best) << "trial " << trial << ", " << m << " bytes";
      const auto schedule = programme.schedule(m);
      ASSERT_EQ(schedule.has_value(), best < kNever);
      if (!schedule) continue;
      offloading += offloads(*schedule) ? 1 : 0;
      selective += keeps_results(*schedule) ? 1 : 0;
      Walk walk{chain};
      walk.run(*schedule, 0, 0);
      ASSERT_LE(walk.peak, m);
      ASSERT_EQ(walk.seconds, best);
      // The simulation is never above the programme, but for the gradient that its caller has.
      ASSERT_LE(simulate(chain, *schedule).peak, m + 2 * chain.back().gradient);
      ASSERT_EQ(simulate(chain, *schedule).seconds, best);
    }
  }
  EXPECT_GT(offloading, 100);
  EXPECT_GT(selective, 100);
}

TEST(ChainProgramme, ReversesUniformChainsAsRevolveDoes) {
  // Blocks that are only ever kept at the moment of their backward, and activations of one byte:
  // the fewest further runs forward of n blocks from c stored activations are those of Griewank and
  // Walther's Revolve, r n - beta(c + 1, r - 1), where beta(c, r) = (c + r)! / (c! r!) and r is the
  // least with beta(c, r) >= n.
  const auto beta = [](int c, int r) {
    double result = 1;
    for (int i = 1; i <= r; ++i) result = result * (c + i) / i;
    return result;
  };
  BlockProfile block;
  block.forward_seconds = 1;
  block.output = 1;
  block.saved = 50;
  for (const int n : {2, 5, 10, 20, 40}) {
    const ChainProgramme programme(std::vector<BlockProfile>(n, block), 0);
    for (int c = 1; c <= n; ++c) {
      int r = 0;
      while (beta(c, r) < n) ++r;
      EXPECT_EQ(programme.seconds(static_cast<std::size_t>(c)), n + r * n - beta(c + 1, r - 1))
          << n << " blocks, " << c << " activations";
    }
  }
}

// ---- Plans of real models

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

TEST(ChainProgramme, FindsMoreForLongChainsThanSegmentsOfEqualLength) {
  // Of 260 blocks that keep two bytes each, 200 bytes hold 100: segments of equal length keep the
  // last one whole and no more, the programme all that fits.
  BlockProfile block;
  block.forward_seconds = 1;
  block.output = block.gradient = 1;
  block.light_peak = block.forward_peak = 1;
  block.saved = 1;
  block.backward_peak = 3;
  const std::vector<BlockProfile> chain(260, block);
  const ScheduleChoice choice({chain}, 0);
  const CostedSchedule* best = choice.fastest(200);
  ASSERT_NE(best, nullptr);
  EXPECT_LE(best->cost.peak, 200u);
  EXPECT_EQ(simulate(chain, best->schedule).seconds, best->cost.seconds);
  double segments = kNever;
  for (std::size_t length = 1; length < chain.size(); ++length) {
    Schedule schedule;
    for (std::size_t i = 0; i < chain.size(); i += length) {
      const std::size_t end = std::min(i + length, chain.size());
      Schedule inner;
      for (std::size_t k = i; k < end; ++k) inner.push_back({k, k + 1});
      if (end == chain.size()) {
        schedule.insert(schedule.end(), inner.begin(), inner.end());
      } else {
        schedule.push_back({i, end, inner});
      }
    }
    const ScheduleCost cost = simulate(chain, schedule);
    if (cost.peak <= 200) segments = std::min(segments, cost.seconds);
  }
  EXPECT_LT(best->cost.seconds, segments - 50);
}

}  // namespace
}  // namespace cairn::checkpointing::planner
