// plan_training: the arithmetic of sharding, and what it predicts against real training by each
// choice.
#include "cairn/checkpointing/training_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "cairn/kernels/copy.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "checkpointing/planned_training.h"
#include "checkpointing/temporary_folder.h"
#include "support/cpu_only.h"
#include "support/expect_error.h"
#include "support/tensors.h"
#include "training_plan/paired_times.h"

namespace cairn::checkpointing::training_plans {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Small models

constexpr std::int64_t kWidth = 64, kTokens = 32, kWords = 1000, kSamples = 8;

class Block : public nn::Module {
 public:
  Block()
      : norm1_(add_module("norm1", nn::LayerNorm(kWidth))),
        norm2_(add_module("norm2", nn::LayerNorm(kWidth))),
        attention_(add_module("attention", nn::MultiheadAttention(kWidth, 4, {.causal = true}))),
        up_(add_module("up",
                       nn::Linear(kWidth, 4 * kWidth, {.activation = autograd::Activation::gelu}))),
        down_(add_module("down", nn::Linear(4 * kWidth, kWidth))) {}
  std::string kind() const override { return "Block"; }
  Tensor forward(const Tensor& x) override {
    const Tensor y = x + (*attention_)((*norm1_)(x));
    return y + (*down_)((*up_)((*norm2_)(y)));
  }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Block>(); }

 private:
  std::shared_ptr<nn::LayerNorm> norm1_, norm2_;
  std::shared_ptr<nn::MultiheadAttention> attention_;
  std::shared_ptr<nn::Linear> up_, down_;
};

Task gpt() {
  manual_seed(1);
  Task task;
  task.model.add(nn::Embedding(kWords, kWidth));
  for (int i = 0; i < 4; ++i) task.model.add(Block());
  task.model.add(nn::LayerNorm(kWidth));
  task.model.add(nn::Linear(kWidth, kWords, {.bias = false}));
  task.batch.x = random_classes({kSamples, kTokens}, kWords, 2);
  task.batch.target = random_classes({kSamples, kTokens}, kWords, 3);
  return task;
}

Task conv_net() {
  manual_seed(1);
  Task task;
  task.model = nn::Sequential(
      nn::Conv2d(1, 16, 5, {.padding = 2}), nn::BatchNorm2d(16, {.relu = true}), nn::MaxPool2d(2),
      nn::Conv2d(16, 32, 5, {.padding = 2}), nn::BatchNorm2d(32, {.relu = true}), nn::MaxPool2d(2),
      nn::Flatten(), nn::Linear(32 * 7 * 7, 10));
  const std::int64_t samples = core::default_device().is_cuda() ? 16 : 32;  // simulated: slow
  task.batch.x = test::normal_tensor({samples, 1, 28, 28}, 2);
  task.batch.target = random_classes({samples}, 10, 3);
  return task;
}

// ---- Real training

void expect_predicted(Task task, std::size_t budget, const std::vector<std::int64_t>& sizes,
                      std::size_t at_least) {
  const TemporaryFolder folder;
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0], checkpointing::precisions()[1],
                        checkpointing::precisions()[3]};
  options.micro_batches = sizes;
  options.compact_state = true;
  const bool on_gpu = task.batch.x.device().is_cuda();
  if (on_gpu) {  // a simulated one takes its time
    options.precisions = {checkpointing::precisions()[3]};
    options.micro_batches = {sizes.back()};
  }
  options.offload = OffloadOptions{.folder = folder.string(), .min_bytes = 4096};
  const std::size_t before = core::memory_stats(task.batch.x.device()).current_total;
  const TrainingPlan plan = plan_training(task.model, task.batch, budget, {}, options);
  EXPECT_EQ(core::memory_stats(task.batch.x.device()).current_total, before);
  EXPECT_GE(plan.choices().size(), on_gpu ? 4 : at_least) << plan.table(100);
  for (const TrainingChoice& choice : plan.choices()) {
    const std::size_t kept = core::memory_stats(task.batch.x.device()).current_total - before;
    const std::size_t measured = trained_peak(task, choice) - kept;
    EXPECT_LE(measured, choice.peak_bytes) << choice.describe() << ": over";
    EXPECT_GE(static_cast<double>(measured),
              (on_gpu ? 0.88 : 0.9) * static_cast<double>(choice.peak_bytes))
        << choice.describe();
    EXPECT_TRUE(!choice.fits || measured <= budget) << choice.describe();
  }
}

TEST(TrainingPlan, PredictsThePeakOfEveryChoiceOfASmallGpt) {
  expect_predicted(gpt(), 10'000'000, {8, 2}, 20);
}

TEST(TrainingPlan, PredictsThePeakOfEveryChoiceOfAConvNet) {
  expect_predicted(conv_net(), 6'000'000, {32, 8}, 12);
}

/// Of every choice, within 2 %.
void expect_near_peaks(Task& task, const std::vector<checkpointing::Precision>& precisions,
                       const std::vector<std::int64_t>& micro_batches) {
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = precisions;
  options.micro_batches = micro_batches;
  const std::size_t before = core::memory_stats(task.batch.x.device()).current_total;
  const TrainingPlan plan = plan_training(task.model, task.batch, SIZE_MAX / 2, {}, options);
  ASSERT_FALSE(plan.choices().empty());
  for (const TrainingChoice& choice : plan.choices()) {
    const std::size_t kept = core::memory_stats(task.batch.x.device()).current_total - before;
    const auto measured = static_cast<double>(trained_peak(task, choice) - kept);
    EXPECT_NEAR(measured / static_cast<double>(choice.peak_bytes), 1.0, 0.02) << choice.describe();
  }
}

// The product of a weight's gradient takes more scratch than what it multiplies; how much depends
// on where it writes, and whether it adds.
TEST(TrainingPlan, CountsTheScratchOfSmallProducts) {
  CAIRN_CPU_ONLY("oneDNN's scratch");
  Task task;
  task.model = nn::Sequential(nn::Linear(72, 64), nn::LayerNorm(64), nn::Linear(64, 208));
  task.batch.x = test::normal_tensor({96, 72}, 2);
  task.batch.target = random_classes({96}, 208, 3);
  expect_near_peaks(task, {checkpointing::precisions()[1], checkpointing::precisions()[3]},
                    {48, 88, 96});  // 88, and the rest of 8 adds
}

/// y = x. The gradient of its weight, 0, takes memory where it adds to another.
struct MadeBeside {
  static constexpr autograd::OpInfo kInfo{"made_beside"};
  Tensor forward(autograd::Context& /*ctx*/, const Tensor& x, const Tensor& /*weight*/) {
    const Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  autograd::Tensors backward(autograd::Context& ctx, const Tensor& dy) {
    const autograd::GradTarget dx = ctx.grad_target(0), dweight = ctx.grad_target(1);
    kernels::copy(dy, dx.tensor);
    if (dweight.accumulate) {
      const Tensor beside = Tensor::empty({1 << 16});
    } else {
      kernels::fill(dweight.tensor, 0.0);
    }
    return {dx.tensor, dweight.tensor};
  }
};

class AddsBeside : public nn::Module {
 public:
  AddsBeside() : weight_(add_parameter("weight", Tensor::zeros({8}))) {}
  std::string kind() const override { return "AddsBeside"; }
  Tensor forward(const Tensor& x) override { return autograd::apply(MadeBeside{}, x, weight_); }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<AddsBeside>(); }

 private:
  Tensor weight_;
};

TEST(TrainingPlan, CountsWhatAddingToAGradientTakes) {
  Task task;
  task.model = nn::Sequential(nn::Linear(16, 512), nn::GELU(), AddsBeside(), nn::Linear(512, 10));
  task.batch.x = test::normal_tensor({96, 16}, 2);
  task.batch.target = random_classes({96}, 10, 3);
  expect_near_peaks(task, {checkpointing::precisions()[0]}, {48, 88});  // 88, and 8 that add
}

void expect_exact_at_o1(Task& task, int devices) {
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[1]};
  options.micro_batches = {task.batch.x.size(0)};
  const Device device = core::default_device();
  const std::size_t before = core::memory_stats(device).current_total;
  const TrainingPlan plan =
      plan_training(task.model, task.batch, SIZE_MAX / 2, {.devices = devices}, options);
  for (const TrainingChoice& choice : plan.choices()) {
    const std::size_t kept = core::memory_stats(device).current_total - before;
    const std::size_t measured = trained_peak(task, choice, options.moments, devices) - kept;
    EXPECT_LE(measured, choice.peak_bytes) << choice.describe() << " on " << devices;
    EXPECT_GE(static_cast<double>(measured), 0.98 * static_cast<double>(choice.peak_bytes))
        << choice.describe() << " on " << devices;
  }
}

// The last module keeps a half copy of its input, which is gone when the outputs of all devices are
// gathered.
TEST(TrainingPlan, PredictsThePeakOfALossBehindTheModel) {
  manual_seed(1);
  Task task;
  task.model = nn::Sequential(nn::Embedding(72, 64), nn::Linear(64, 72, {.bias = false}));
  task.batch = {random_classes({7, 16}, 72, 2), random_classes({7, 16}, 72, 3)};
  for (const int devices : {1, 2}) expect_exact_at_o1(task, devices);
}

// The first product's weight is half in the forward alone: no gradient of the input asks for it.
TEST(TrainingPlan, PredictsThePeakOfWeightsThatNoBackwardNeeds) {
  manual_seed(1);
  Task task;
  task.model = nn::Sequential(nn::Linear(72, 48), nn::Linear(48, 97));
  task.batch = {test::normal_tensor({5, 72}, 2), random_classes({5}, 97, 3)};
  expect_exact_at_o1(task, 1);
}

TEST(TrainingPlan, SaysWhatFitsWhatDoesNotAndWhatIsWrong) {
  Task task = gpt();
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0], checkpointing::precisions()[3]};
  const TrainingPlan plan = plan_training(task.model, task.batch, 9'000'000, {.ranks = 4}, options);
  EXPECT_TRUE(plan.best().fits);
  const auto& all = plan.choices();
  EXPECT_TRUE(std::is_partitioned(all.begin(), all.end(), [](const auto& c) { return c.fits; }));
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const auto& c) { return !c.fits; }));
  const auto first_not = std::find_if(all.begin(), all.end(), [](auto& c) { return !c.fits; });
  EXPECT_TRUE(std::is_sorted(all.begin(), first_not,
                             [](const auto& a, const auto& b) { return a.seconds < b.seconds; }));
  for (const TrainingChoice& c : all) {
    EXPECT_EQ(c.peak_bytes, c.weights + c.gradients + c.optimizer_state + c.other + c.activations);
    EXPECT_EQ(c.micro_batch * c.micro_batches, kSamples);
  }
  EXPECT_THAT(plan.table(), HasSubstr("\nO2 bf16  "));
  EXPECT_THAT(plan.table(), HasSubstr(" choices fit"));
  // A whole batch takes more memory than a choice of micro-batches counts.
  const auto small =
      std::find_if(all.begin(), all.end(), [](const auto& c) { return c.micro_batches > 1; });
  test::expect_error<core::InvalidArgument>(
      [&] { small->loss(task.model, task.batch.x, task.batch.target); },
      {core::str("at most ", small->micro_batch, " samples"), "micro_batches of them"});

  const TrainingPlan hopeless = plan_training(task.model, task.batch, 2'000'000, {}, options);
  EXPECT_THAT(message_of<core::OutOfMemory>([&] { hopeless.best(); }),
              HasSubstr("expected a budget"));
  const auto refused = [&](const TrainingBatch& batch, const TrainingWorld& world) {
    return message_of<core::InvalidArgument>(
        [&] { (void)plan_training(task.model, batch, 9'000'000, world, options); });
  };
  EXPECT_THAT(refused({task.batch.x, part_of(task.batch.target, 0, 4)}, {}),
              HasSubstr("expected as many targets as inputs, got 4 and 8"));
  EXPECT_THAT(refused({}, {}), HasSubstr("expected a batch"));
  EXPECT_THAT(refused(task.batch, {.ranks = 0}), HasSubstr("expected ranks"));
  optim::FusedAdam optimizer(task.model.parameters());
  const amp::Amp precision =
      amp::initialize(task.model, optimizer, {.opt_level = amp::OptLevel::O2});
  EXPECT_THAT(refused(task.batch, {}), HasSubstr("plan before amp::initialize"));
}

TEST(TrainingPlan, ChangesNoResultsUnlessAllowed) {
  Task task = conv_net();
  task.batch = {part_of(task.batch.x, 0, 8), part_of(task.batch.target, 0, 8)};
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[3]};
  const auto planned = [&](std::size_t budget) {
    return plan_training(task.model, task.batch, budget, {}, options);
  };
  const TrainingPlan same = planned(100'000'000);
  for (const TrainingChoice& choice : same.choices()) {
    EXPECT_EQ(choice.micro_batches, 1) << choice.describe();
    EXPECT_FALSE(choice.compact_state || choice.changes_results()) << choice.describe();
  }
  EXPECT_THAT(same.table(), Not(HasSubstr("*")));
  EXPECT_THAT(message_of<core::OutOfMemory>([&] { (void)planned(500'000).best(); }),
              HasSubstr("split_batch_norms and compact_state"));

  options.split_batch_norms = options.compact_state = true;
  const TrainingPlan any = planned(100'000'000);
  int split = 0, rounded = 0;
  for (const TrainingChoice& choice : any.choices()) {
    EXPECT_EQ(choice.splits_batch_norms, choice.micro_batches > 1) << choice.describe();
    EXPECT_EQ(choice.rounds_moments, choice.compact_state) << choice.describe();
    split += choice.splits_batch_norms ? 1 : 0;
    rounded += choice.rounds_moments ? 1 : 0;
  }
  EXPECT_GE(split, 6);
  EXPECT_GE(rounded, 4);
  EXPECT_THAT(any.table(), AllOf(HasSubstr("2 x 4 *  "), HasSubstr("compact *  "),
                                 HasSubstr("\n* changes results: ")));

  // Without moments nothing is rounded; batch norms in eval() have no statistics to change.
  options.split_batch_norms = false;
  options.moments = 0;
  task.model.eval();
  for (const TrainingPlan plan = planned(100'000'000); const auto& choice : plan.choices()) {
    EXPECT_FALSE(choice.changes_results()) << choice.describe();
    split -= choice.micro_batches > 1 ? 1 : 0;
  }
  EXPECT_EQ(split, 0);
}

// Whether nothing runs in it or just not enough.
TEST(TrainingPlan, ARefusedBudgetNamesTheLeastThatDoes) {
  Task task = conv_net();
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0], checkpointing::precisions()[3]};
  options.micro_batches = {4, 8};
  options.compact_state = true;
  const auto planned = [&](std::size_t budget) {
    return plan_training(task.model, task.batch, budget, {}, options);
  };
  std::size_t budget = 1;
  for (int i = 0; i < 2; ++i) {
    const std::string message =
        message_of<core::OutOfMemory>([&] { (void)planned(budget).best(); });
    const std::string start = "expected a budget of at least ";
    ASSERT_THAT(message, HasSubstr(start));
    const std::size_t least = std::stoull(message.substr(message.find(start) + start.size()));
    const TrainingPlan plan = planned(least);
    EXPECT_LE(plan.best().peak_bytes, least) << plan.table();
    budget = least - 1;
  }
}

// The states of this model are most of what it takes.
TEST(TrainingPlan, MeasuresWithinABudgetInWhichSomethingFits) {
  manual_seed(1);
  Task task;
  task.model = nn::Sequential(nn::Linear(256, 256), nn::ReLU(), nn::Linear(256, 256));
  task.batch.x = test::normal_tensor({4, 256}, 2);
  task.batch.target = random_classes({4}, 256, 3);
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0], checkpointing::precisions()[3]};
  options.compact_state = true;
  const auto planned = [&](std::size_t budget) {
    return plan_training(task.model, task.batch, budget, {}, options);
  };
  const TrainingPlan unbounded = planned(SIZE_MAX);
  std::size_t least = SIZE_MAX;
  for (const TrainingChoice& choice : unbounded.choices()) {
    least = std::min(least, choice.peak_bytes);
  }
  const Device device = core::default_device();
  const std::size_t capacity = core::memory_capacity(device);
  core::set_memory_capacity(device, least);
  EXPECT_NO_THROW(EXPECT_TRUE(planned(least).best().fits));
  core::set_memory_capacity(device, capacity);
}

// A step has as many updates as one, and as many exchanges; the last micro-batch may be smaller.
TEST(TrainingPlan, CountsTheExchangeOfGradientsAndTheLastMicroBatch) {
  Task task = conv_net();
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0], checkpointing::precisions()[3]};
  options.micro_batches = {12};
  const TrainingPlan plan =
      plan_training(task.model, task.batch, 100'000'000, {.ranks = 4, .bandwidth = 1e4}, options);
  for (const TrainingChoice& choice : plan.choices()) {
    const double exchange = 2 * static_cast<double>(choice.gradients) * 3 / 4 / 1e4;
    EXPECT_GT(choice.seconds, exchange) << choice.describe();
    EXPECT_LT(choice.seconds, exchange + 5) << choice.describe();
    EXPECT_EQ(choice.micro_batches, 3) << choice.describe();  // 12, 12 and 8
  }
}

// As plan_recomputation does.
TEST(TrainingPlan, MeasuresWithThreadsThatSleepWhileTheyWait) {
  if (core::num_threads() == 1) GTEST_SKIP() << "one thread waits for nobody";
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  Task task = conv_net();
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0]};
  options.micro_batches = {8};
  core::parallel_for(1000, 1, [](std::int64_t, std::int64_t) {});  // starts the usual ones
  const auto before = threads();
  std::ptrdiff_t most = 0;
  options.loss = [&](const Tensor& y, const Tensor& target) {
    most = std::max<std::ptrdiff_t>(most, threads());
    return autograd::cross_entropy(y, target);
  };
  (void)plan_training(task.model, task.batch, 100'000'000, {}, options);
  EXPECT_GT(most, before);
}

// ---- Times beside other work

// A run that other work makes three times as long, now and then.
std::vector<std::function<double()>> noisy_works(std::mt19937_64& random, std::vector<int>& runs,
                                                 const std::vector<double>& seconds) {
  std::vector<std::function<double()>> works;
  runs.assign(seconds.size(), 0);
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    works.emplace_back([&random, &runs, i, base = seconds[i]] {
      ++runs[i];
      const double jitter = 1 + 0.2 * static_cast<double>(random() % 1000) / 1000;
      return base * jitter * (random() % 3 == 0 ? 3 : 1);
    });
  }
  return works;
}

TEST(PairedTimes, FindTheFastestBesideOtherWork) {
  std::mt19937_64 random(5);
  std::vector<int> runs;
  int wrong = 0, wrong_of_one_run = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const auto works = noisy_works(random, runs, {1783, 700, 1500});
    wrong_of_one_run += works[1]() > std::min(works[0](), works[2]()) ? 1 : 0;
    const std::vector<double> times = paired_times(works);
    wrong += times[1] > std::min(times[0], times[2]) ? 1 : 0;
  }
  EXPECT_LE(wrong, 20);
  EXPECT_GE(wrong_of_one_run, 150);
}

TEST(PairedTimes, EndWhereNothingDiffersAndSoonWhereAllDoes) {
  std::mt19937_64 random(5);
  std::vector<int> runs;
  paired_times(noisy_works(random, runs, {700, 700}));
  EXPECT_LE(runs[0], static_cast<int>(kMostRounds));
  const std::vector<double> times =
      paired_times({[&] { return ++runs[0], 1.0; }, [&] { return ++runs[1], 2.0; }});
  EXPECT_EQ(times, (std::vector<double>{1, 2}));
  const int before = runs[0];
  paired_times({[&] { return ++runs[0], 1.0; }, [&] { return ++runs[1], 2.0; }});
  EXPECT_EQ(runs[0] - before, 5);  // 5 of 5 happen by chance in 1 of 32 cases, 4 of 4 in 1 of 16
  EXPECT_EQ(paired_times({[] { return 7.0; }}), (std::vector<double>{7}));
}

// A loss that sleeps: a whole batch has one, and eight micro-batches eight.
TEST(TrainingPlan, TakesTheFastestWhateverElseTheMachineDoes) {
  CAIRN_CPU_ONLY("a GPU's host sleeps beside it");
  Task task = gpt();
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0]};
  options.micro_batches = {4, 8};
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    std::mt19937_64 random(seed);
    options.loss = [&](const Tensor& y, const Tensor& target) {
      const auto other_work = random() % 2 == 0 ? 60 : 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(20 + other_work));
      return autograd::cross_entropy(y, target);
    };
    const TrainingPlan plan = plan_training(task.model, task.batch, 100'000'000, {}, options);
    EXPECT_EQ(plan.best().micro_batch, 8) << seed << "\n" << plan.table();
  }
}

TEST(TrainingPlan, OffersSizesThatRunInTheBudget) {
  Task task = gpt();
  TrainingPlanOptions options;
  options.tensors_only = true;
  options.precisions = {checkpointing::precisions()[0]};
  const auto sizes_in = [&](std::size_t budget) {
    std::set<std::int64_t> sizes;
    const TrainingPlan plan = plan_training(task.model, task.batch, budget, {}, options);
    for (const TrainingChoice& choice : plan.choices()) sizes.insert(choice.micro_batch);
    return sizes;
  };
  EXPECT_THAT(sizes_in(100'000'000), testing::Contains(kSamples));
  const std::set<std::int64_t> few = sizes_in(2'500'000);
  EXPECT_FALSE(few.empty());
  EXPECT_THAT(few, testing::Not(testing::Contains(kSamples)));
}

}  // namespace
}  // namespace cairn::checkpointing::training_plans
