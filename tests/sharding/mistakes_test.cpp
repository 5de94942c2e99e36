// What sharded trainings of other libraries have got wrong without a word, each at every stage. The
// reference is what one process computes from all ranks' batches. The rest of the list stands with
// what it is about: a rank that skips a layer, tied weights of two units in
// parameters_of_models_test.cpp; an evaluation between a backward and its step, a forward that
// throws, a use of a part for the whole in parameters_test.cpp; states of other sizes in
// states_test.cpp; no_sync in no_sync_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>

#include "cairn/core/memory.h"
#include "cairn/kernels/copy.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"
#include "support/step.h"

namespace cairn {
namespace {

using parallel::ZeroStage;
using test::inputs;
using test::loss_of;
using Numbers = std::vector<double>;

constexpr int kRanks = 3;

/// Layers whose batch statistics and products differ between ranks.
class SmallNet : public nn::Sequential {
 public:
  SmallNet() {
    manual_seed(21);
    add(nn::Linear(test::kInputs, 300));
    add(nn::BatchNorm1d(300));
    add(nn::Linear(300, 11));
  }
};

/// By name; of the mean over the ranks of sums of batches `first` to `last`, with these weights.
std::map<std::string, Numbers> mean_gradients(const nn::Module& weights, std::uint64_t first,
                                              std::uint64_t last) {
  SmallNet net;
  net.load_state_dict(weights.state_dict());
  std::map<std::string, Numbers> sums;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (std::uint64_t batch = first; batch <= last; ++batch) {
      net.clear_grad();
      const auto seed = batch * 16 + static_cast<unsigned>(rank);
      autograd::backward(loss_of(net(test::normal_tensor({4, test::kInputs}, seed))));
      for (const auto& [name, tensor] : net.parameters()) {
        const Numbers own = tensor.grad().to_vector();
        Numbers& sum = sums[name];
        sum.resize(own.size());
        for (std::size_t i = 0; i < own.size(); ++i) sum[i] += own[i] / kRanks;
      }
    }
  }
  return sums;
}

double norm_of(const std::map<std::string, Numbers>& gradients, double type) {
  double sum = 0, most = 0;
  for (const auto& [name, own] : gradients) {
    for (const double x : own) {
      sum += std::pow(std::abs(x), type);
      most = std::max(most, std::abs(x));
    }
  }
  return std::isinf(type) ? most : std::pow(sum, 1 / type);
}

class Mistakes : public testing::TestWithParam<ZeroStage> {
 protected:
  struct Job {
    Job(parallel::ProcessGroup& group, ZeroStage stage, optim::SgdOptions options = {.lr = 0.5})
        : sharded(net, group, {.stage = stage}), optimizer(net.parameters(), options) {}
    void backward(const parallel::ProcessGroup& group, std::uint64_t batch) {
      autograd::backward(loss_of(sharded(inputs(group, batch))));
    }
    std::map<std::string, Numbers> weights() {
      const auto whole = sharded.gather_parameters();
      std::map<std::string, Numbers> all;
      for (const auto& [name, tensor] : net.parameters()) all[name] = tensor.to_vector();
      return all;
    }
    std::map<std::string, Numbers> reference(std::uint64_t first, std::uint64_t last) {
      const auto whole = sharded.gather_parameters();
      SmallNet copy;
      for (std::size_t i = 0; i < net.parameters().size(); ++i)
        kernels::copy(net.parameters()[i].tensor, copy.parameters()[i].tensor);
      return mean_gradients(copy, first, last);
    }

    SmallNet net;
    parallel::ShardedDataParallel sharded;
    optim::FusedSGD optimizer;
  };

  /// That a step moved the weights by factor * lr * gradients.
  static void expect_moved(const std::map<std::string, Numbers>& before,
                           const std::map<std::string, Numbers>& after,
                           const std::map<std::string, Numbers>& gradients, double factor = 1.0) {
    double most = 0;
    for (const auto& [name, own] : before) {
      for (std::size_t i = 0; i < own.size(); ++i) {
        const double moved = own[i] - after.at(name)[i];
        ASSERT_NEAR(moved, 0.5 * factor * gradients.at(name)[i], 2e-7) << name << " " << i;
        most = std::max(most, std::abs(moved));
      }
    }
    EXPECT_GT(most, 1e-4);
  }

  void run(const std::function<void(parallel::ProcessGroup&)>& body) {
    test::run_threads(kRanks, body);
  }
};

// Not of a rank's part, nor off by the square root of the number of ranks.
TEST_P(Mistakes, ClipNormOfTheShard) {
  run([](parallel::ProcessGroup& group) {
    Job job(group, GetParam());
    const auto expected = job.reference(1, 1);
    const auto before = job.weights();
    job.backward(group, 1);
    const double bound = 0.5 * norm_of(expected, 2);
    const optim::StepResult result = job.optimizer.step({.max_gradient_norm = bound});
    EXPECT_NEAR(result.gradient_norm, 2 * bound, 1e-5 * bound);
    EXPECT_NEAR(result.clip_coefficient, 0.5, 1e-5);
    expect_moved(before, job.weights(), expected, 0.5);
  });
}

TEST_P(Mistakes, InfinityNormThatIsAlwaysOne) {
  run([](parallel::ProcessGroup& group) {
    Job job(group, GetParam());
    const auto expected = job.reference(2, 2);
    const auto before = job.weights();
    job.backward(group, 2);
    const double infinity = std::numeric_limits<double>::infinity(),
                 largest = norm_of(expected, infinity);
    const optim::StepResult result =
        job.optimizer.step({.max_gradient_norm = largest / 4, .norm_type = infinity});
    EXPECT_NEAR(result.gradient_norm, largest, 1e-5 * largest);
    expect_moved(before, job.weights(), expected, 0.25);
  });
}

TEST_P(Mistakes, GradientsOfTheLastMicroBatchLeakIntoTheNextStep) {
  run([](parallel::ProcessGroup& group) {
    Job job(group, GetParam());
    job.backward(group, 1);
    if (GetParam() == ZeroStage::optimizer_states) (void)job.optimizer.stash();
    job.backward(group, 2);
    test::expect_applied(job.optimizer.step());
    const auto expected = job.reference(3, 3);
    const auto before = job.weights();
    job.backward(group, 3);
    test::expect_applied(job.optimizer.step());
    expect_moved(before, job.weights(), expected);
  });
}

TEST_P(Mistakes, LostGradientsOfSeveralBackwards) {
  run([](parallel::ProcessGroup& group) {
    Job job(group, GetParam());
    const auto expected = job.reference(1, 3);
    const auto before = job.weights();
    for (std::uint64_t batch = 1; batch <= 3; ++batch) {
      if (batch > 1 && GetParam() == ZeroStage::optimizer_states) (void)job.optimizer.stash();
      job.backward(group, batch);
    }
    test::expect_applied(job.optimizer.step());
    expect_moved(before, job.weights(), expected);
  });
}

/// An Adam of two groups over weights of two dtypes (O2 keeps batch norms in f32), several of one
/// shape, with all that a state holds.
struct Mixed {
  class Net : public nn::Sequential {
   public:
    Net() {
      manual_seed(31);
      for (int i = 0; i < 3; ++i) {
        add(nn::Linear(40, 40));
        add(nn::BatchNorm1d(40));
      }
    }
  };
  Mixed(parallel::ProcessGroup& group, ZeroStage stage)
      : sharded(net, group, {.stage = stage, .units = units(stage)}), optimizer(groups(net), {}) {
    precision.emplace(amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()}));
    state.emplace(
        std::vector<checkpointing::TrainingState::Part>{
            {"model", net}, {"optimizer", optimizer}, {"amp", *precision}, {"ddp", sharded}},
        sharded.world());
  }
  /// A layer and its norm, of another dtype, in one.
  static std::vector<std::string> units(ZeroStage stage) {
    return stage == ZeroStage::parameters ? std::vector<std::string>{"0", "1", "2", "3"}
                                          : std::vector<std::string>{};
  }
  static std::vector<optim::ParameterGroup> groups(const nn::Module& net) {
    std::vector<optim::ParameterGroup> two(2);
    two[0].lr = 1e-2;
    two[1].lr = 2e-3;
    std::size_t i = 0;
    for (const NamedTensor& one : net.parameters()) two[i++ % 2].parameters.push_back(one);
    return two;
  }
  void step(const parallel::ProcessGroup& group, std::uint64_t batch) {
    precision->backward(loss_of(sharded(inputs(group, batch, 40))));
    test::expect_applied(precision->step());
  }
  std::vector<Numbers> weights() {
    const auto whole = sharded.gather_parameters();
    std::vector<Numbers> all;
    for (const auto& [name, tensor] : net.parameters()) all.push_back(tensor.to_vector());
    return all;
  }

  Net net;
  parallel::ShardedDataParallel sharded;
  optim::FusedAdam optimizer;
  std::optional<amp::Amp> precision;
  std::optional<checkpointing::TrainingState> state;
};

/// A run that is saved after two steps and resumed, beside one that goes on.
void expect_resumes(ZeroStage stage) {
  const auto dir = std::filesystem::temp_directory_path() /
                   core::str("cairn-mistakes-", getpid(), "-", static_cast<int>(stage));
  std::filesystem::remove_all(dir);
  test::run_threads(kRanks, [&](parallel::ProcessGroup& group) {
    Mixed whole(group, stage), resumed(group, stage);
    for (std::uint64_t batch = 1; batch <= 2; ++batch) whole.step(group, batch);
    whole.state->save(dir.string(), 2);
    resumed.step(group, 9);  // something else
    ASSERT_TRUE(resumed.state->resume_latest(dir.string()));
    EXPECT_EQ(resumed.optimizer.steps(), 2);
    ASSERT_EQ(resumed.weights(), whole.weights());
    for (std::uint64_t batch = 3; batch <= 5; ++batch) {
      whole.step(group, batch);
      resumed.step(group, batch);
      ASSERT_EQ(resumed.weights(), whole.weights()) << batch;
    }
    std::vector<std::pair<std::string, StateDict::Value>> a, b;
    test::tensors_of(whole.optimizer.state_dict(), "", a);
    test::tensors_of(resumed.optimizer.state_dict(), "", b);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].first, b[i].first);
      const auto& left = std::get<Shard>(a[i].second);
      const auto& right = std::get<Shard>(b[i].second);
      EXPECT_EQ(left.begin, right.begin) << a[i].first;
      EXPECT_EQ(left.tensor.to_vector(), right.tensor.to_vector()) << a[i].first;
    }
  });
  std::filesystem::remove_all(dir);
}

// Adam's bias correction would make the next steps as large as the first, moments that are dropped
// or another parameter's would turn them elsewhere.
TEST_P(Mistakes, MomentsDroppedSwappedOrOfAnOldStepAfterResuming) {
  expect_resumes(GetParam());
}

// Seven tensors of less than a block each: all of them are one rank's.
TEST_P(Mistakes, RanksThatHoldNothing) {
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(5, 3), nn::Linear(3, 2)),
        same(nn::Linear(5, 3), nn::Linear(3, 2));
    parallel::ShardedDataParallel sharded(net, group, {.stage = GetParam()});
    parallel::DistributedDataParallel plain(same, group);
    {
      const auto whole = sharded.gather_parameters();
      same.load_state_dict(net.state_dict());
    }
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    for (std::uint64_t step = 0; step < 3; ++step) {
      autograd::backward(loss_of(sharded(inputs(group, step, 5))));
      autograd::backward(loss_of(plain(inputs(group, step, 5))));
      test::expect_applied(optimizer.step());
      test::expect_applied(expected.step());
      const auto whole = sharded.gather_parameters();
      ASSERT_EQ(test::difference_of_weights(net, same), "") << step;
    }
  });
}

TEST_P(Mistakes, FrozenParametersWithGradients) {
  test::run_ranks(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(300, 300), nn::Linear(300, 2));
    for (NamedTensor& p : net.at(0).parameters()) p.tensor.set_requires_grad(false);
    parallel::ShardedDataParallel sharded(net, group, {.stage = GetParam()});
    optim::FusedAdam optimizer(net.parameters());
    for (std::uint64_t step = 0; step < 2; ++step) {
      core::reset_peak_memory(core::default_device());
      autograd::backward(loss_of(sharded(inputs(group, step, 300))));
      const auto stats = core::memory_stats(core::default_device());
      EXPECT_LT(stats.peak_of(core::MemoryCategory::gradients), 4U * 2 * 600 * 2);
      test::expect_applied(optimizer.step());
      EXPECT_LT(
          core::memory_stats(core::default_device()).of(core::MemoryCategory::optimizer_state),
          8U * 2 * 600 * 2);
    }
  });
}

// A load holds this rank's part and a few tensors on their way, not the model on each rank.
TEST_P(Mistakes, AllOfTheStateOnEachRankAtLoad) {
  const auto dir = std::filesystem::temp_directory_path() /
                   core::str("cairn-load-", getppid(), "-", static_cast<int>(GetParam()));
  test::run_ranks(2, [&](parallel::ProcessGroup& group) {
    if (group.rank() == 0) std::filesystem::remove_all(dir);
    nn::Sequential net;
    for (int i = 0; i < 8; ++i) net.add(nn::Linear(256, 256));
    parallel::ShardedDataParallel sharded(net, group, {.stage = GetParam()});
    optim::FusedAdam optimizer(net.parameters());
    checkpointing::TrainingState state({{"model", net}, {"optimizer", optimizer}}, sharded.world());
    autograd::backward(loss_of(sharded(inputs(group, 1, 256))));
    test::expect_applied(optimizer.step());
    state.save(dir.string(), 1);
    core::reset_peak_memory(core::default_device());
    const core::MemoryStats before = core::memory_stats(core::default_device());
    const std::size_t moments = before.of(core::MemoryCategory::optimizer_state);
    const std::size_t own = moments + before.of(core::MemoryCategory::parameters);
    ASSERT_TRUE(state.resume_latest(dir.string()));
    // What is read, what was here until all has loaded, and the new moments beside the old ones.
    EXPECT_LE(core::memory_stats(core::default_device()).peak_total,
              before.current_total + 2 * own + moments + (64 << 10));
    group.barrier();
    if (group.rank() == 0) std::filesystem::remove_all(dir);
  });
}

INSTANTIATE_TEST_SUITE_P(, Mistakes,
                         testing::Values(ZeroStage::optimizer_states, ZeroStage::gradients,
                                         ZeroStage::parameters),
                         [](const auto& info) {
                           return core::str("stage_", static_cast<int>(info.param));
                         });

}  // namespace
}  // namespace cairn
