// Sharded trainings of real processes: what a rank keeps, and what the others hear where one cannot
// take its part in a step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>

#include "cairn/amp/captured_step.h"
#include "cairn/core/memory.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"
#include "support/step.h"

namespace cairn {
namespace {

using test::make;
using test::Recipe;
using test::Training;
using ::testing::HasSubstr;

/// 1 MiB of weights, in tensors that no number of ranks divides.
nn::Sequential wide_net() {
  return nn::Sequential(nn::Linear(301, 407), nn::Linear(407, 299));
}

// 12 n / N bytes of masters and moments, and at most 1,024 elements of each tensor more.
TEST(ShardedMemory, IsWhatTheFormulaSays) {
  test::run_ranks(3, [](parallel::ProcessGroup& group) {
    nn::Sequential net = wide_net();
    parallel::ShardedDataParallel sharded(net, group);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
    for (int step = 0; step < 3; ++step) {
      precision.backward(
          autograd::mse_loss(sharded(Tensor::full({4, 301}, 0.1)), Tensor::full({4, 299}, 0.2)));
      ASSERT_TRUE(precision.step().applied);
    }
    std::size_t elements = 0, tensors = 0;
    for (const auto& [name, tensor] : net.parameters()) {
      elements += static_cast<std::size_t>(tensor.numel());
      ++tensors;
    }
    const core::MemoryStats stats = core::memory_stats(core::default_device());
    const std::size_t states = stats.of(core::MemoryCategory::optimizer_state);
    EXPECT_GE(states, 12 * elements / 3 - 12 * 1024 * tensors);
    EXPECT_LE(states, 12 * elements / 3 + 12 * 1024 * tensors + 64 * 3 * tensors);
    EXPECT_LE(stats.of(core::MemoryCategory::parameters), 2 * elements + 64 * tensors);
  });
}

/// Where masters and moments are, and what they take.
struct KeptStates {
  const char* name;
  optim::StateOptions options;
  std::int64_t bytes_each;  // of a master, and of each of two moments

  bool in_files() const { return !options.folder.empty(); }
};

std::vector<KeptStates> kept_states() {
  optim::StateOptions compact{.moments = DType::bf16, .masters = optim::MasterStorage::remainder};
  optim::StateOptions in_files{.folder = std::filesystem::temp_directory_path().string()};
  return {{"f32", {}, 4}, {"compact", compact, 2}, {"in files", in_files, 4}};
}

double accounted(core::MemoryCategory category) {
  return static_cast<double>(core::memory_stats(core::default_device()).of(category));
}

/// Of this process's mappings of files without a name.
double bytes_in_files() {
  const std::string folder = std::filesystem::temp_directory_path().string();
  std::ifstream maps("/proc/self/maps");
  double bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with("(deleted)") || line.find(folder) == std::string::npos) continue;
    std::size_t dash = 0;
    const auto begin = std::stoull(line, &dash, 16);
    bytes += static_cast<double>(std::stoull(line.substr(dash + 1), nullptr, 16) - begin);
  }
  return bytes;
}

struct MemoryForm {
  parallel::ZeroStage stage;
  int ranks, within;
  int shards() const { return within == 0 ? ranks : within; }
  int copies() const { return ranks / shards(); }
};

/// Of the states of a weight in files, whole pages each, on all ranks.
double pages_of(std::int64_t numel, std::int64_t bytes_each, const MemoryForm& form) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  std::int64_t bytes = 0;
  for (int shard = 0; shard < form.shards(); ++shard) {
    const std::int64_t own = core::even_part(numel, shard, form.shards()).size() * bytes_each;
    bytes += 3 * ((own + page - 1) / page * page);
  }
  return static_cast<double>(bytes * form.copies());
}

void expect_memory_of_formula(const MemoryForm& form, const KeptStates& states) {
  SCOPED_TRACE(core::str("stage ", static_cast<int>(form.stage), ", ", form.ranks, " ranks by ",
                         form.within, ", states ", states.name));
  constexpr std::int64_t kLayers = 4, kWidth = 256;
  const double n = kLayers * (kWidth * kWidth + kWidth);
  const double small_states = 12.0 * kLayers * kWidth * form.copies();  // no file is worth them
  const auto expect_near = [](double bytes, double expected) {
    EXPECT_NEAR(bytes, expected, 0.02 * expected);
  };
  test::run_threads(form.ranks, [&](parallel::ProcessGroup& group) {
    nn::Sequential net;
    for (std::int64_t i = 0; i < kLayers; ++i) net.add(nn::Linear(kWidth, kWidth));
    parallel::ShardedDataParallel sharded(net, group,
                                          {.stage = form.stage, .shard_within = form.within});
    optim::FusedAdam optimizer(net.parameters());
    optimizer.set_state_options(states.options);
    amp::Amp precision = amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
    for (int step = 0; step < 2; ++step) {
      precision.backward(test::loss_of(sharded(test::inputs(group, 1, kWidth))));
      group.barrier();
      const double whole = form.ranks, copies = form.copies();
      const bool in_parts = form.stage == parallel::ZeroStage::parameters;
      const bool divides_gradients = form.stage >= parallel::ZeroStage::gradients;
      if (step == 1 && group.rank() == 0) {
        using core::MemoryCategory;
        expect_near(accounted(MemoryCategory::parameters), 2 * n * (in_parts ? copies : whole));
        expect_near(accounted(MemoryCategory::gradients),
                    2 * n * (divides_gradients ? copies : whole));
        const double held = accounted(MemoryCategory::optimizer_state);
        if (states.in_files()) {
          EXPECT_LE(held, small_states);
          EXPECT_EQ(bytes_in_files(), kLayers * pages_of(kWidth * kWidth, states.bytes_each, form));
        } else {
          expect_near(held, 3.0 * static_cast<double>(states.bytes_each) * n * copies);
          EXPECT_EQ(bytes_in_files(), 0);
        }
      }
      group.barrier();
      ASSERT_TRUE(precision.step().applied);
    }
  });
}

// Weights, gradients, masters and moments of all ranks together, at O2 with Adam, before a step.
TEST(ShardedMemory, OfOneToEightRanks) {
  for (const auto stage : {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::gradients,
                           parallel::ZeroStage::parameters}) {
    for (const KeptStates& states : kept_states()) {
      for (int ranks = 1; ranks <= 8; ++ranks) expect_memory_of_formula({stage, ranks, 0}, states);
    }
    for (const auto& [ranks, within] :
         {std::pair{4, 2}, std::pair{6, 3}, std::pair{6, 2}, std::pair{4, 1}})
      expect_memory_of_formula({stage, ranks, within}, kept_states().front());
  }
}

/// One rank has no memory for its update, while the others wait for its part.
template <class Optimizer>
void expect_failed_update_reaches_all() {
  test::run_ranks(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net = wide_net();
    parallel::ShardedDataParallel sharded(net, group);
    Optimizer optimizer(net.parameters());
    autograd::backward(
        autograd::mse_loss(sharded(Tensor::full({4, 301}, 0.1)), Tensor::full({4, 299}, 0.2)));
    const auto held = core::memory_stats(core::default_device()).current_total;
    if (group.rank() == 1) core::set_memory_capacity(core::default_device(), held + (1 << 16));
    const std::string said = test::message_of<core::Error>([&] { (void)optimizer.step(); });
    core::set_memory_capacity(core::default_device(), SIZE_MAX);
    const char* expected = group.rank() == 1 ? "what the capacity leaves" : "its update failed";
    EXPECT_THAT(said, HasSubstr(expected));
  });
}

TEST(ShardedRanks, AFailedUpdateReachesTheOthers) {
  expect_failed_update_reaches_all<optim::FusedAdam>();
}

// The others wait for norms of its parts.
TEST(ShardedRanks, AFailedFirstPassReachesTheOthers) {
  expect_failed_update_reaches_all<optim::FusedLAMB>();
}

// Buckets of two losses never mix.
TEST(ShardedRanks, LossesInAnotherOrderAreAnErrorThatNamesBoth) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net = wide_net();
    parallel::ShardedDataParallel sharded(net, group);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(net, optimizer,
                                         {.opt_level = amp::OptLevel::O2,
                                          .half_dtype = DType::bf16,
                                          .num_losses = 2,
                                          .world = sharded.world()});
    const std::string said = test::message_of<core::CommunicationError>([&] {
      const Tensor y = sharded(Tensor::full({4, 301}, 0.1));
      precision.backward(autograd::mse_loss(y, Tensor::full({4, 299}, 0.2)),
                         {.loss_id = group.rank()});
    });
    EXPECT_THAT(said, HasSubstr("'loss 0 scaled by 1: "));
    EXPECT_THAT(said, HasSubstr("'loss 1 scaled by 1: "));
  });
}

// Where memory is not row-major there is no part that a state could name.
TEST(ShardedRanks, ParametersThatAreNotRowMajorAreUnsupported) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    class Strided : public nn::Module {
     public:
      Strided() : weight(add_parameter("weight", make_weight())) {}
      std::string kind() const override { return "Strided"; }
      Tensor forward(const Tensor& x) override { return autograd::mul(x, weight); }
      static Tensor make_weight() {
        Tensor w = Tensor::empty_strided({3, 4}, {1, 3}, DType::f32, core::default_device());
        kernels::fill(w, 0.5);
        return w;
      }
      Tensor weight;
    } net;
    parallel::ShardedDataParallel sharded(net, group);
    EXPECT_THAT(
        test::message_of<core::Unsupported>([&] { optim::FusedAdam optimizer(net.parameters()); }),
        HasSubstr("expected row-major parameters, got 'weight'"));
  });
}

// At each stage, whether the optimizer or the wrapper was first; the training goes on without.
TEST(ShardedRanks, CapturedStepsAreUnsupported) {
  for (const auto stage : {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::gradients,
                           parallel::ZeroStage::parameters}) {
    for (const bool optimizer_first : {false, true}) {
      test::run_threads(2, [&](parallel::ProcessGroup& group) {
        nn::Sequential net = wide_net();
        std::optional<optim::FusedAdam> early;
        if (optimizer_first) early.emplace(net.parameters());
        parallel::ShardedDataParallel sharded(net, group, {.stage = stage});
        if (!optimizer_first) early.emplace(net.parameters());
        optim::FusedAdam& optimizer = *early;
        amp::Amp precision = amp::initialize(
            net, optimizer,
            {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()});
        const auto loss = [&](const Tensor& x) { return test::loss_of(sharded(x)); };
        const Tensor x = test::inputs(group, 1, 301);
        amp::CapturedStep step(precision, loss);
        EXPECT_THAT(test::message_of<core::Unsupported>([&] { step(x); }),
                    HasSubstr("states that are divided among ranks"));
        precision.set_capturable(false);
        optimizer.clear_grad();
        precision.backward(loss(x));
        test::expect_applied(precision.step());
      });
    }
  }
}

// The optimizer has been told of no ranks when it becomes capturable.
TEST(ShardedRanks, CapturableStepsOfAnEarlierOptimizerAreUnsupported) {
  for (const auto stage : {parallel::ZeroStage::optimizer_states, parallel::ZeroStage::gradients,
                           parallel::ZeroStage::parameters}) {
    test::run_threads(2, [&](parallel::ProcessGroup& group) {
      nn::Sequential net = wide_net();
      optim::FusedAdam optimizer(net.parameters());
      parallel::ShardedDataParallel sharded(net, group, {.stage = stage});
      optimizer.set_capturable(true);
      autograd::backward(test::loss_of(sharded(test::inputs(group, 1, 301))));
      EXPECT_THAT(test::message_of<core::Unsupported>([&] { (void)optimizer.step(); }),
                  HasSubstr("states that are divided among ranks"));
      optimizer.set_capturable(false);
      test::expect_applied(optimizer.step());
    });
  }
}

// With one rank there is nothing to divide.
TEST(ShardedRanks, OneRankIsDistributedDataParallel) {
  auto group = parallel::ProcessGroup::single();
  const Recipe recipe{.name = "adam",
                      .optimizer = make<optim::FusedAdam>(optim::AdamOptions{.lr = 1e-2})};
  Training sharded(recipe, group, test::kStates), plain(recipe, group, test::kPlain);
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(sharded.step().applied);
    EXPECT_TRUE(plain.step().applied);
  }
  EXPECT_EQ(test::difference_of_weights(sharded.net, plain.net), "");
  std::int64_t elements = 0;
  EXPECT_EQ(test::difference_in_parts(sharded.optimizer->state_dict(),
                                      plain.optimizer->state_dict(), elements),
            "");
  EXPECT_EQ(elements, 0);
}

}  // namespace
}  // namespace cairn
