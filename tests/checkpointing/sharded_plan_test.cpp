// plan_training of several ranks: what each keeps and sends by what they divide, against formulas
// in bytes a parameter, and which choice a budget leads to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cairn/autograd/ops.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "checkpointing/planned_training.h"
#include "checkpointing/temporary_folder.h"
#include "checkpointing/threads_world.h"
#include "plan/chain_schedule.h"
#include "support/cpu_only.h"
#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::checkpointing::training_plans {
namespace {

using ::testing::HasSubstr;

// 16 layers of 2^16 parameters each, which 2 and 4 ranks divide without a rest.
constexpr int kLayers = 16;
constexpr std::int64_t kWide = 256;
constexpr std::size_t kParameters = kLayers * kWide * kWide;
constexpr std::size_t kLayerSize = kWide * kWide;
constexpr int kBatch = 5;

Task wide_task() {
  manual_seed(1);
  Task task;
  for (int i = 0; i < kLayers; ++i) task.model.add(nn::Linear(kWide, kWide, {.bias = false}));
  task.batch.x = test::normal_tensor({kBatch, kWide}, 2);
  task.batch.target = random_classes({kBatch}, kWide, 3);
  return task;
}

/// Every gradient is reduced by itself, and nothing changes results.
TrainingWorld world_of(int ranks) {
  return {.ranks = ranks, .bandwidth = 1e6, .first_bucket_bytes = 1, .bucket_bytes = 1};
}

TrainingPlanOptions options_of(std::size_t precision, std::vector<std::int64_t> micro_batches) {
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.fused_loss = false;
  options.precisions = {checkpointing::precisions()[precision]};
  options.micro_batches = std::move(micro_batches);
  options.shardings = checkpointing::shardings();
  return options;
}

constexpr std::size_t kF32 = 0, kO2 = 3;  // of precisions()

/// Bytes a parameter of one of N ranks, as docs/sharding.md has them.
struct Formula {
  double weights, gradients, states;
};

Formula formula(Sharding sharding, bool half, bool accumulates, double ranks) {
  const double value = half ? 2 : 4, master = half ? 4 : 0, sum = accumulates ? 4 : 0;
  const double states = master + 8;
  switch (sharding) {
    case Sharding::none:
      return {value, accumulates ? 4 : value, states};
    case Sharding::optimizer_states:
      return {value, accumulates ? 4 : value, states / ranks};
    case Sharding::gradients:
      return {value, (value + sum) / ranks, states / ranks};
    case Sharding::parameters:
      return {value / ranks, (value + sum) / ranks, states / ranks};
  }
  return {};
}

/// Bytes a parameter that a rank sends in a step: an all_reduce is a reduce_scatter and a gather.
double sent_a_parameter(Sharding sharding, bool half, double backwards, double ranks) {
  const double value = half ? 2 : 4, summed = backwards > 1 ? 4 : value;
  const double share = (ranks - 1) / ranks;
  switch (sharding) {
    case Sharding::none:
      return 2 * summed * share;
    case Sharding::optimizer_states:
      return (2 * summed + value) * share;
    case Sharding::gradients:
      return (backwards * value + value) * share;
    case Sharding::parameters:
      return backwards * 3 * value * share;
  }
  return 0;
}

TEST(ShardedPlan, CountsWhatTheFormulasSay) {
  CAIRN_CPU_ONLY("a GPU has tables of pointers beside");
  Task task = wide_task();
  for (const int ranks : {2, 4}) {
    for (const std::size_t precision : {kF32, kO2}) {
      const TrainingPlan plan = plan_training(task.model, task.batch, SIZE_MAX / 4, world_of(ranks),
                                              options_of(precision, {1, kBatch}));
      EXPECT_EQ(plan.choices().size(), 8U);
      for (const TrainingChoice& choice : plan.choices()) {
        SCOPED_TRACE(core::str(ranks, " ranks, ", choice.describe()));
        const bool half = precision == kO2, accumulates = choice.micro_batches > 1;
        const Formula bytes = formula(choice.sharding, half, accumulates, ranks);
        EXPECT_EQ(static_cast<double>(choice.weights), bytes.weights * kParameters);
        EXPECT_EQ(static_cast<double>(choice.gradients), bytes.gradients * kParameters);
        EXPECT_EQ(static_cast<double>(choice.optimizer_state), bytes.states * kParameters);
        EXPECT_EQ(choice.in_files, 0U);
        const auto backwards = static_cast<double>(choice.micro_batches);
        EXPECT_DOUBLE_EQ(
            choice.exchange_seconds,
            sent_a_parameter(choice.sharding, half, backwards, ranks) * kParameters / 1e6);
        EXPECT_EQ(choice.peak_bytes, choice.weights + choice.gradients + choice.optimizer_state +
                                         choice.other + choice.activations);
      }
    }
  }
}

// Four ranks on two hosts: what goes across, and within, is what docs/adr/0026-hybrid-sharding.md
// says of a byte of gradients; a byte of weights is gathered by all, or within a host.
TEST(ShardedPlan, CountsCopiesOfHosts) {
  CAIRN_CPU_ONLY("a GPU has tables of pointers beside");
  Task task = wide_task();
  TrainingWorld world = world_of(4);
  world.ranks_per_host = 2;
  world.host_bandwidth = 1e7;
  struct Sent {
    double across, in_host;
  };
  const auto expected = [](const TrainingChoice& choice, double backwards) {
    const bool divided = choice.sharding >= Sharding::gradients, copies = choice.shard_within > 0;
    const Sent whole{1.0, 0.5}, parts{0.5, 0.25}, pieces{0.75, 0.25};
    const Sent gradients = !divided ? whole : copies ? pieces : parts;
    const Sent weights = copies ? Sent{0, 0.5} : parts;
    const double value = 2, summed = divided || backwards == 1 ? value : 4;
    const double reduced = summed * (divided ? backwards : 1);
    const double gathered = value * (choice.sharding == Sharding::none         ? 0
                                     : choice.sharding == Sharding::parameters ? 2 * backwards
                                                                               : 1);
    return Sent{reduced * gradients.across + gathered * weights.across,
                reduced * gradients.in_host + gathered * weights.in_host};
  };
  const TrainingPlan plan =
      plan_training(task.model, task.batch, SIZE_MAX / 4, world, options_of(kO2, {1, kBatch}));
  EXPECT_EQ(plan.choices().size(), 14U);
  for (const TrainingChoice& choice : plan.choices()) {
    SCOPED_TRACE(choice.describe());
    const int dividing = choice.shard_within > 0 ? choice.shard_within : 4;
    const Formula bytes = formula(choice.sharding, true, choice.micro_batches > 1, dividing);
    EXPECT_EQ(static_cast<double>(choice.weights), bytes.weights * kParameters);
    EXPECT_EQ(static_cast<double>(choice.gradients), bytes.gradients * kParameters);
    EXPECT_EQ(static_cast<double>(choice.optimizer_state), bytes.states * kParameters);
    const Sent sent = expected(choice, static_cast<double>(choice.micro_batches));
    EXPECT_DOUBLE_EQ(choice.exchange_seconds,
                     kParameters * (sent.across / 1e6 + sent.in_host / 1e7));
  }
  EXPECT_THAT(plan.table(100), HasSubstr("ZeRO 3 within 2"));
  // In 10.5 bytes a parameter all four could divide; within a host less goes across.
  const auto best =
      plan_training(task.model, task.batch, static_cast<std::size_t>(10.5 * kParameters), world,
                    options_of(kO2, {kBatch}))
          .best();
  EXPECT_EQ(best.shard_within, 2) << best.describe();
}

// A rest of blocks of 1,024 elements: the rank that has most counts.
TEST(ShardedPlan, CountsTheRankThatHasMost) {
  CAIRN_CPU_ONLY("a GPU has tables of pointers beside");
  manual_seed(1);
  Task task;
  task.model.add(nn::Linear(70, 50));  // 3,500 = 3 x 1,024 + 428 and 50: the last has 1,452 + 50
  task.batch.x = test::normal_tensor({2, 70}, 2);
  task.batch.target = random_classes({2}, 50, 3);
  const TrainingPlan plan =
      plan_training(task.model, task.batch, SIZE_MAX / 4, world_of(3), options_of(kF32, {2}));
  for (const TrainingChoice& choice : plan.choices()) {
    if (choice.sharding == Sharding::none) continue;
    EXPECT_EQ(choice.optimizer_state, 8U * (1452 + 50)) << choice.describe();
  }
}

// Five micro-batches: what sends least needs most. In bytes a parameter of four ranks: 18, 9, 6.5
// and 5, of which stages 1 and 2 need 2.5 more while small weights are gathered in flat buffers
// (and stage 2 half a byte less: gradients are in their sums by then). Sent: 8, 10, 12 and 30 times
// 3 / 4.
TEST(ShardedPlan, TakesTheFastestThatFitsTheBudget) {
  CAIRN_CPU_ONLY("a GPU has tables of pointers beside");
  Task task = wide_task();
  const auto planned = [&](double bytes_a_parameter) {
    return plan_training(task.model, task.batch,
                         static_cast<std::size_t>(bytes_a_parameter * kParameters), world_of(4),
                         options_of(kO2, {1}));
  };
  const std::map<double, Sharding> expected{{19.0, Sharding::none},
                                            {12.0, Sharding::optimizer_states},
                                            {9.0, Sharding::gradients},
                                            {6.2, Sharding::parameters}};
  for (const auto& [budget, sharding] : expected) {
    const TrainingPlan plan = planned(budget);
    EXPECT_EQ(plan.best().sharding, sharding) << plan.table();
    EXPECT_LE(plan.best().peak_bytes, plan.budget());
  }
  const TrainingPlan all = planned(19.0);
  EXPECT_EQ(all.choices().front().sharding, Sharding::none);
  EXPECT_TRUE(std::is_sorted(all.choices().begin(), all.choices().end(), [](auto& a, auto& b) {
    return a.sharding < b.sharding;
  })) << all.table();
  EXPECT_THAT(all.table(), HasSubstr("chosen, because no faster one fits: O2 bf16, 5 x 1\n"));
  EXPECT_THAT(all.table(), HasSubstr("MB (O2 bf16, 5 x 1, recompute, ZeRO 3)\n"));

  const TrainingPlan hopeless = planned(3.9);
  const std::string message = test::message_of<core::OutOfMemory>([&] { (void)hopeless.best(); });
  EXPECT_THAT(message, HasSubstr("ZeRO 3"));
  const std::string start = "expected a budget of at least ";
  ASSERT_THAT(message, HasSubstr(start));
  const std::size_t least = std::stoull(message.substr(message.find(start) + start.size()));
  EXPECT_GE(least, 5 * kParameters);
  EXPECT_LE(least, 5 * kParameters + 8 * 2 * kLayerSize);  // units, their gradients and buffers
  EXPECT_EQ(all.least().peak_bytes, least);                // whatever fits
  EXPECT_EQ(planned(static_cast<double>(least) / kParameters).best().sharding,
            Sharding::parameters);
}

TEST(ShardedPlan, IsNeverSlowerWithMoreMemory) {
  CAIRN_CPU_ONLY("a GPU has tables of pointers beside");
  Task task = wide_task();
  double before = 1e30;
  int times = 0;
  for (double share = 4.0; share < 20; share += 0.7) {
    const TrainingPlan plan =
        plan_training(task.model, task.batch, static_cast<std::size_t>(share * kParameters),
                      world_of(4), options_of(kO2, {1, kBatch}));
    if (!plan.choices().front().fits) continue;
    EXPECT_LE(plan.best().seconds, 1.01 * before) << plan.table();
    if (plan.best().seconds < 0.9 * before) ++times;
    before = plan.best().seconds;
  }
  EXPECT_GE(times, 2);
}

// ---- States in files

TEST(ShardedPlan, PutsStatesIntoFilesWhereNothingElseFits) {
  CAIRN_CPU_ONLY("a GPU has tables of pointers beside");
  const TemporaryFolder folder;
  Task task = wide_task();
  TrainingPlanOptions options = options_of(kO2, {kBatch});
  options.states_folder = folder.string();
  options.states_bandwidth = 1e5;
  const auto planned = [&](double bytes_a_parameter, int ranks) {
    return plan_training(task.model, task.batch,
                         static_cast<std::size_t>(bytes_a_parameter * kParameters), world_of(ranks),
                         options);
  };
  // Alone: 16 bytes a parameter, or 4 and the 12 of masters and moments in files.
  EXPECT_FALSE(planned(17, 1).best().states_in_files);
  const TrainingPlan small = planned(8, 1);
  const TrainingChoice& alone = small.best();
  EXPECT_TRUE(alone.states_in_files) << small.table();
  EXPECT_EQ(alone.optimizer_state, 0U);
  EXPECT_EQ(alone.in_files, 12 * kParameters);
  EXPECT_GE(alone.update_seconds, 2 * 12 * kParameters / 1e5);
  EXPECT_LE(alone.update_seconds, 2 * 12 * kParameters / 1e5 + 5);
  EXPECT_THAT(small.table(), HasSubstr("f32, in files"));
  EXPECT_THAT(alone.describe(), HasSubstr(", states in files"));
  // Of four ranks each has a quarter of them. Links are ten times as fast as files: ZeRO 3 first.
  EXPECT_EQ(planned(5.2, 4).best().sharding, Sharding::parameters);
  EXPECT_FALSE(planned(5.2, 4).best().states_in_files);
  const TrainingPlan least = planned(2.6, 4);
  EXPECT_TRUE(least.best().states_in_files) << least.table();
  EXPECT_EQ(least.best().in_files, 12 * kParameters / 4);
}

TEST(ShardedPlan, TimesAnUpdateInFilesWhereNobodySaysHowFastTheyAre) {
  CAIRN_CPU_ONLY("an update is timed on the CPU alone");
  const TemporaryFolder folder;
  Task task = wide_task();
  TrainingPlanOptions options = options_of(kF32, {kBatch});
  options.states_folder = folder.string();
  const TrainingPlan plan = plan_training(task.model, task.batch, SIZE_MAX / 4, {}, options);
  ASSERT_EQ(plan.choices().size(), 2U);
  double in_memory = 0, in_files = 0;
  for (const TrainingChoice& choice : plan.choices())
    (choice.states_in_files ? in_files : in_memory) = choice.update_seconds;
  EXPECT_GT(in_memory, 0);
  EXPECT_GT(in_files, in_memory);
  EXPECT_LT(in_files, 10);
}

// Less than a page is no file's.
TEST(ShardedPlan, KeepsSmallStatesInMemory) {
  CAIRN_CPU_ONLY("a GPU's states are nowhere on it then");
  const TemporaryFolder folder;
  manual_seed(1);
  Task task;
  task.model.add(nn::Linear(32, 64));  // 8,192 bytes of each moment, and 256 of the bias's
  task.batch.x = test::normal_tensor({2, 32}, 2);
  task.batch.target = random_classes({2}, 64, 3);
  TrainingPlanOptions options = options_of(kF32, {2});
  options.states_folder = folder.string();
  options.states_bandwidth = 1e9;
  const TrainingPlan plan = plan_training(task.model, task.batch, SIZE_MAX / 4, {}, options);
  for (const TrainingChoice& choice : plan.choices()) {
    EXPECT_EQ(choice.in_files, choice.states_in_files ? 2 * 8192U : 0U);
    EXPECT_EQ(choice.optimizer_state, choice.states_in_files ? 2 * 256U : 2 * (8192U + 256U));
  }
}

// ---- States on the host

TEST(ShardedPlan, PutsStatesOnTheHostWhereNothingElseFits) {
  if (!core::default_device().is_cuda()) GTEST_SKIP() << "of GPUs";
  Task task = wide_task();
  TrainingPlanOptions options = options_of(kO2, {kBatch});
  options.compact_state = options.states_on_host = true;
  const auto planned = [&](double bytes_a_parameter, int ranks) {
    return plan_training(task.model, task.batch,
                         static_cast<std::size_t>(bytes_a_parameter * kParameters), world_of(ranks),
                         options);
  };
  // Alone 16 bytes a parameter, 10 with compact state, or 4 and the 12 of masters and moments.
  const TrainingPlan small = planned(8, 1);
  const TrainingChoice& alone = small.best();
  EXPECT_TRUE(alone.states_on_host && !alone.compact_state) << small.table();
  EXPECT_EQ(alone.optimizer_state, 0U);
  EXPECT_EQ(alone.on_host, 12 * kParameters);
  EXPECT_GT(alone.update_seconds, 0);
  EXPECT_THAT(small.table(), HasSubstr("f32, on the host"));
  EXPECT_THAT(small.table(), HasSubstr("chosen, because no faster one fits: O2 bf16, states on"));
  const std::size_t peak = trained_peak(task, alone);
  EXPECT_LE(peak, alone.peak_bytes);
  EXPECT_GE(static_cast<double>(peak), 0.95 * static_cast<double>(alone.peak_bytes));
  // Of four ranks each has a quarter of them.
  const TrainingPlan of_four = planned(100, 4);
  for (const TrainingChoice& choice : of_four.choices()) {
    const std::size_t parts = choice.sharding == Sharding::none ? 1 : 4;
    EXPECT_EQ(choice.on_host, choice.states_on_host ? 12 * kParameters / parts : 0U)
        << choice.describe();
  }
  options.moments = 0;
  options.precisions = {checkpointing::precisions()[kF32]};  // there are no states
  const TrainingPlan stateless = planned(100, 1);
  for (const TrainingChoice& choice : stateless.choices()) EXPECT_FALSE(choice.states_on_host);
}

TEST(ShardedPlan, HasNoStatesOnTheHostBesideAModelOfTheHosts) {
  CAIRN_CPU_ONLY("of CPUs");
  Task task = wide_task();
  TrainingPlanOptions options = options_of(kO2, {kBatch});
  options.states_on_host = true;
  EXPECT_THAT(test::message_of<core::InvalidArgument>(
                  [&] { (void)plan_training(task.model, task.batch, SIZE_MAX / 4, {}, options); }),
              HasSubstr("expected a model on a GPU for states_on_host, got one on cpu"));
}

// ---- Weights that come and go

// Blocks that keep nothing: what stands is their weights.
TEST(GatheredBeside, AreThoseAtWorkAndTheNext) {
  std::vector<BlockProfile> blocks(3);
  for (BlockProfile& block : blocks) block.saves_input = true;
  ChainBeside beside;
  beside.blocks = {{.weights = 10, .gathering = 1},
                   {.weights = 20, .gathering = 2},
                   {.weights = 40, .gathering = 4}};
  const auto peak = [&](const Schedule& schedule) {
    return simulate(blocks, schedule, beside).peak;
  };
  EXPECT_EQ(peak(plain_schedule(3)), 20U + 40 + 4);  // the second at work, the third on its way
  // A segment's weights stay from its replay until their gradients are there.
  EXPECT_EQ(peak({{0, 3, plain_schedule(3)}}), 10U + 20 + 40 + 4);
  EXPECT_EQ(peak({{0, 2, plain_schedule(2)}, {2, 3}}), 20U + 40 + 4);
  // Tied: the last uses the first's as well, which stay for all of the backward.
  beside.blocks[2].ties = {0};
  EXPECT_EQ(peak(plain_schedule(3)), 10U + 20 + 40 + 4);
  // The first block's backward has the most gradients beside it: 100, and the weights of two.
  beside.blocks[2].ties.clear();
  beside.blocks[0].gradients = 100;
  EXPECT_EQ(peak(plain_schedule(3)), 100U + 10);
}

// ---- Ranks whose measures differ

TEST(ShardedPlan, RanksTakeRankZerosChoice) {
  const auto choice = [](std::string name, double seconds, Sharding sharding) {
    TrainingChoice one;
    one.precision = {std::move(name), DType::bf16, false, true};
    one.micro_batch = 3;
    one.micro_batches = 4;
    one.sharding = sharding;
    one.shard_within = 2;
    one.seconds = seconds;
    one.fits = true;
    one.peak_bytes = 1234;
    return one;
  };
  TrainingChoice first = choice("O2 bf16", 1.0, Sharding::gradients);
  const auto results = std::make_shared<const std::vector<SegmentOperation>>(
      std::vector<SegmentOperation>{{"linear", 1}, {"self_attention", 0}});
  first.schedule = {
      {0, 2, {{0, 1}, {1, 2, {{1, 2}}}}}, {2, 3, {}, true}, {3, 4, {}, false, results}};
  first.recomputes = first.offloads = first.states_in_files = first.states_on_host = true;
  first.on_host = 777;
  TrainingChoice second = choice("O2 f16", 2.0, Sharding::none);
  ThreadsWorld world(2);
  std::vector<TrainingChoice> got(2);
  std::vector<std::string> refused(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      TrainingChoice a = first, b = second;
      if (rank == 1) std::swap(a.seconds, b.seconds);  // it measured otherwise
      b.loss_function = a.loss_function = [rank](const Tensor&, const Tensor&) {
        return Tensor::full({1}, rank);
      };
      const auto at = static_cast<std::size_t>(rank);
      got[at] = TrainingPlan({a, b}, 5000).best(world.of(rank));
      a.fits = rank == 1;
      refused[at] = test::message_of<core::OutOfMemory>(
          [&] { (void)TrainingPlan({a}, 1000).best(world.of(rank)); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(got[rank].describe(), first.describe());
    EXPECT_EQ(got[rank].seconds, 1.0);
    EXPECT_EQ(got[rank].peak_bytes, 1234U);
    EXPECT_EQ(got[rank].on_host, 777U);
    EXPECT_EQ(got[rank].micro_batch, 3);
    EXPECT_EQ(got[rank].precision.half, DType::bf16);
    EXPECT_TRUE(got[rank].precision.half_weights);
    ASSERT_EQ(got[rank].schedule.size(), 3U);
    EXPECT_EQ(got[rank].schedule[0].inner.size(), 2U);
    EXPECT_EQ(got[rank].schedule[0].inner[1].inner.size(), 1U);
    EXPECT_TRUE(got[rank].schedule[1].offloaded);
    EXPECT_EQ(*got[rank].schedule[2].results, *results);
    EXPECT_EQ(got[rank].loss_function({}, {}).item(), static_cast<double>(rank));  // its own
    EXPECT_THAT(refused[rank], HasSubstr("expected a budget of at least 1234 bytes"));
  }
}

TEST(ShardedPlan, SaysWhatIsWrong) {
  Task task = wide_task();
  const auto refused = [&](const TrainingWorld& world, const TrainingPlanOptions& options) {
    return test::message_of<core::InvalidArgument>(
        [&] { (void)plan_training(task.model, task.batch, SIZE_MAX / 4, world, options); });
  };
  TrainingPlanOptions options = options_of(kF32, {kBatch});
  EXPECT_THAT(refused({.ranks = 2}, options), HasSubstr("expected a bandwidth"));
  EXPECT_THAT(refused({.ranks = 2, .devices = 2, .bandwidth = 1}, options),
              HasSubstr("expected one device a process"));
  EXPECT_THAT(refused({.ranks = 2, .bandwidth = 1, .bucket_bytes = 0}, options),
              HasSubstr("expected buckets"));
  EXPECT_THAT(refused({.ranks = 4, .bandwidth = 1, .ranks_per_host = 3}, options),
              HasSubstr("expected ranks_per_host to divide the number of ranks, 4"));
  options.shardings = {};
  EXPECT_THAT(refused({}, options), HasSubstr("expected shardings, got none"));
  options.shardings = {Sharding::none};
  options.states_bandwidth = -1;
  EXPECT_THAT(refused({}, options), HasSubstr("expected a states_bandwidth"));
}

}  // namespace
}  // namespace cairn::checkpointing::training_plans
