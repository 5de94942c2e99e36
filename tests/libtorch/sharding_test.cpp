// Optimizer states and gradients of libtorch's modules that ranks divide: the bits of data parallel
// training, half the memory, and states that any form of training resumes.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>

#include "cairn/checkpointing/training_state.h"
#include "cairn/core/memory.h"
#include "cairn/libtorch/optimizer.h"
#include "libtorch/support.h"
#include "parallel/ranks.h"
#include "support/message_of.h"
#include "support/search.h"

namespace cairn::test {
namespace {

using parallel::ZeroStage;
using ::testing::HasSubstr;

/// Each gradient is a bucket, which leaves in the midst of libtorch's backward.
parallel::ShardedOptions divided(ZeroStage stage) {
  return {.stage = stage, .distributed = {.first_bucket_bytes = 1, .bucket_bytes = 1}};
}
const parallel::ShardedOptions kGradients = divided(ZeroStage::gradients);

/// Ranks are threads, and libtorch's generator is one for all of them.
torch::Tensor waves(torch::IntArrayRef shape, double frequency) {
  return torch::sin(torch::arange(c10::multiply_integers(shape)) * frequency).reshape(shape);
}

struct Thrower : torch::autograd::Function<Thrower> {
  static torch::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                               const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*context*/,
                                               const torch::autograd::tensor_list& /*gradients*/) {
    throw std::runtime_error("expected memory, got none");
  }
};

struct WideNetImpl : torch::nn::Module {
  WideNetImpl()
      : fc1(register_module("fc1", torch::nn::Linear(64, 139))),
        fc2(register_module("fc2", torch::nn::Linear(139, 5))) {
    const torch::NoGradGuard no_grad;
    for (auto& weight : parameters()) weight.copy_(waves(weight.sizes(), 0.7) * 0.2);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(fc1->forward(x));
    if (throws) x = Thrower::apply(x);
    return skips ? x : fc2->forward(x);
  }
  torch::nn::Linear fc1, fc2;
  bool skips = false;
  bool throws = false;  // in the backward, between the two layers
};
TORCH_MODULE(WideNet);

class Trainer {
 public:
  template <class Options>
  Trainer(const parallel::ProcessGroup& group, amp::OptLevel level, const Options& options)
      : model(*net, group, options),
        optimizer(model.parameters(), {.lr = 1e-2}),
        precision(libtorch::initialize(
            model, optimizer,
            {.opt_level = level, .half_dtype = DType::bf16, .world = model.world()})),
        state({{"model", model}, {"optimizer", optimizer}, {"amp", precision}}, model.world()),
        rank_(group.rank()) {}

  optim::StepResult step(std::int64_t number, double factor = 1.0) {
    backward(number, factor);
    return precision.step();
  }
  void backward(std::int64_t number, double factor = 1.0) {
    const auto x = waves({4, 64}, 0.3 + static_cast<double>(3 * number + rank_));
    const auto y = model.run([&](const torch::Tensor& in) { return net->forward(in); }, x);
    precision.backward((y * y).mean() * factor);
  }
  std::vector<torch::Tensor> weights() const {
    std::vector<torch::Tensor> all;
    for (const auto& weight : net->parameters()) all.push_back(weight.detach().clone());
    return all;
  }

  WideNet net;
  libtorch::Model model;
  optim::FusedAdam optimizer;
  libtorch::Amp precision;
  checkpointing::TrainingState state;

 private:
  int rank_;
};

void expect_same_bits(const Trainer& a, const Trainer& b) {
  const auto left = a.weights(), right = b.weights();
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(torch::equal(left[i], right[i])) << i;
}

std::vector<std::int64_t> versions_of(const torch::nn::Module& net) {
  std::vector<std::int64_t> all;
  for (const auto& weight : net.parameters()) all.push_back(weight._version());
  return all;
}

const auto kStages = {ZeroStage::optimizer_states, ZeroStage::gradients};

TEST(LibtorchSharding, HasTheBitsOfDataParallelTraining) {
  for (const auto level : {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2}) {
    for (const ZeroStage stage : kStages) {
      run_threads(3, [&](parallel::ProcessGroup& group) {
        Trainer sharded(group, level, divided(stage)),
            plain(group, level, parallel::DistributedOptions{});
        for (int i = 0; i < 6; ++i) {
          const double factor = i == 3 && group.rank() == 1 ? INFINITY : 1.0;
          const std::vector<std::int64_t> before = versions_of(*sharded.net);
          const optim::StepResult got = sharded.step(i, factor), expected = plain.step(i, factor);
          ASSERT_EQ(got.applied, expected.applied);
          ASSERT_EQ(got.applied, i != 3);
          ASSERT_EQ(got.reason, expected.reason);
          expect_same_bits(sharded, plain);
          // What autograd has saved is stale.
          const std::vector<std::int64_t> after = versions_of(*sharded.net);
          for (std::size_t k = 0; k < before.size(); ++k)
            EXPECT_EQ(after[k] > before[k], got.applied) << k;
        }
      });
    }
  }
}

// Two micro-batches: each reduces, or the last one does; clipped.
TEST(LibtorchSharding, OfGradientsAddsUpAsDataParallelTraining) {
  for (const bool no_sync : {false, true}) {
    run_threads(3, [&](parallel::ProcessGroup& group) {
      Trainer sharded(group, amp::OptLevel::O2, kGradients),
          plain(group, amp::OptLevel::O2, parallel::DistributedOptions{});
      for (int i = 0; i < 4; ++i) {
        for (Trainer* one : {&sharded, &plain}) {
          {
            const auto guard = one->model.no_sync(no_sync);
            one->backward(2 * i);
          }
          if (!no_sync && one == &plain) (void)one->optimizer.stash();
          one->backward(2 * i + 1);
          if (i == 2) one->precision.unscale(one->optimizer);
        }
        const optim::StepOptions options{.max_gradient_norm = 1e-3};
        const optim::StepResult got = sharded.precision.step(options),
                                expected = plain.precision.step(options);
        ASSERT_TRUE(got.applied);
        EXPECT_EQ(got.gradient_norm, expected.gradient_norm);
        EXPECT_LT(got.clip_coefficient, 1.0);
        expect_same_bits(sharded, plain);
      }
    });
  }
}

/// Two trainings that take the same calls, drawn alike on every rank.
class Pair {
 public:
  Pair(const parallel::ProcessGroup& group, ZeroStage stage, amp::OptLevel level,
       std::uint64_t seed)
      : sharded_(group, level, divided(stage)),
        plain_(group, level, parallel::DistributedOptions{}),
        stage_(stage),
        rank_(group.rank()),
        draw_(seed) {}

  void call() {
    switch (draw_.below(7)) {
      case 0:
      case 1:
        return backward();
      case 2:
        return reduced() ? backward() : backward_alone();
      case 3:
        return reduced() ? clear() : backward_that_throws();
      case 4:
        return clear();
      default:
        return step();
    }
  }

 private:
  template <class F>
  void both(F&& f) {
    f(sharded_);
    f(plain_);
  }
  bool reduced() const { return pending_ > 0 && !whole_; }
  double factor() { return draw_.one_in(6) && rank_ == 1 ? INFINITY : 1.0; }

  /// Stage 2 adds the averages of several up in f32, as a stash does.
  void backward() {
    const double scale = factor();
    const bool adds = reduced();
    both([&](Trainer& one) {
      if (adds && (stage_ != ZeroStage::gradients || &one == &plain_)) (void)one.optimizer.stash();
      one.backward(batch_, scale);
    });
    calls_ += core::str("backward x ", scale, ", ");
    whole_ = false;
    ++batch_, ++pending_;
  }
  void backward_alone() {
    const double scale = factor();
    both([&](Trainer& one) {
      const auto no_sync = one.model.no_sync();
      one.backward(batch_, scale);
    });
    calls_ += core::str("backward under no_sync x ", scale, ", ");
    whole_ = true;
    ++batch_, ++pending_;
  }
  /// On every rank, where nobody waits for another; what it left is dropped.
  void backward_that_throws() {
    both([&](Trainer& one) {
      const auto no_sync = one.model.no_sync();
      one.net->throws = true;
      EXPECT_THROW(one.backward(batch_), std::exception);
      one.net->throws = false;
    });
    calls_ += "backward that throws, ";
    clear();
  }
  void clear() {
    both([](Trainer& one) { one.optimizer.clear_grad(); });
    calls_ += "clear, ";
    whole_ = false;
    pending_ = 0;
  }
  void step() {
    if (pending_ == 0) return;
    const optim::StepOptions options{.max_gradient_norm = draw_.one_in(2) ? 1e-3 : 0.0};
    SCOPED_TRACE(calls_);
    const optim::StepResult got = sharded_.precision.step(options),
                            expected = plain_.precision.step(options);
    EXPECT_EQ(got.applied, expected.applied);
    if (!whole_) {  // of whole gradients the message names what rank 0's parts hold
      EXPECT_EQ(got.reason, expected.reason);
    }
    if (expected.applied) {  // else it may be NaN
      EXPECT_EQ(got.gradient_norm, expected.gradient_norm);
    }
    expect_same_bits(sharded_, plain_);
    calls_.clear();
    whole_ = false;
    pending_ = 0;
  }

  Trainer sharded_, plain_;
  ZeroStage stage_;
  int rank_;
  Draw draw_;  // the same on every rank
  std::int64_t batch_ = 0;
  int pending_ = 0;     // backwards since a step
  bool whole_ = false;  // they were under no_sync
  std::string calls_;   // since the last step
};

TEST(LibtorchSharding, HasTheBitsOfDataParallelTrainingWhateverIsCalled) {
  for (const amp::OptLevel level : {amp::OptLevel::O0, amp::OptLevel::O2}) {
    for (const ZeroStage stage : kStages) {
      for (const std::uint64_t seed : search_seeds(6)) {
        SCOPED_TRACE(core::str("O", static_cast<int>(level), ", stage ", static_cast<int>(stage),
                               ", seed ", seed));
        run_threads(2, [&](parallel::ProcessGroup& group) {
          Pair pair(group, stage, level, seed);
          for (int calls = 0; calls < 40 && !testing::Test::HasFailure(); ++calls) pair.call();
        });
      }
    }
  }
}

// Ranks whose losses reach other layers, and such that have run out of batches.
TEST(LibtorchSharding, OfGradientsFollowsUnevenRanks) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    const parallel::DistributedOptions options{.find_unused_parameters = true};
    parallel::ShardedOptions gradients = kGradients;
    gradients.distributed.find_unused_parameters = true;
    Trainer sharded(group, amp::OptLevel::O0, gradients), plain(group, amp::OptLevel::O0, options);
    for (int i = 0; i < 4; ++i) {
      for (Trainer* one : {&sharded, &plain}) {
        one->net->skips = (i + group.rank()) % 2 == 0;
        EXPECT_TRUE(one->step(i).applied);
      }
      expect_same_bits(sharded, plain);
    }
    for (Trainer* one : {&sharded, &plain}) {
      auto join = one->model.ddp()->join();
      for (int batch = 0; batch < 1 + group.rank(); ++batch) EXPECT_TRUE(one->step(batch).applied);
      while (join.other_ranks_have_batches()) {
        one->precision.backward(join.zero());
        EXPECT_TRUE(one->precision.step().applied);
      }
    }
    expect_same_bits(sharded, plain);
  });
}

TEST(LibtorchSharding, KeepsAPartOfTheStates) {
  run_ranks(2, [](parallel::ProcessGroup& group) {
    Trainer sharded(group, amp::OptLevel::O2, parallel::ShardedOptions{});
    (void)sharded.step(1);
    std::size_t elements = 0;
    for (const auto& weight : sharded.net->parameters())
      elements += static_cast<std::size_t>(weight.numel());
    const std::size_t bytes = core::memory_stats({}).of(core::MemoryCategory::optimizer_state);
    EXPECT_LE(bytes, 12 * (elements / 2 + 4 * 1024));
    EXPECT_GT(bytes, 0U);
  });
}

// 2 n / N bytes after a backward; in it the gradients of a bucket beside them, never all.
TEST(LibtorchSharding, OfGradientsKeepsAPartOfThem) {
  run_ranks(2, [](parallel::ProcessGroup& group) {
    constexpr std::int64_t kLayers = 8, kWidth = 200;
    torch::nn::Sequential net;
    for (int i = 0; i < kLayers; ++i)
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    libtorch::Model model(*net, group, kGradients);
    optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
    auto precision = libtorch::initialize(
        model, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = model.world()});
    constexpr std::size_t kLayer = 2 * kWidth * kWidth, kUneven = 2 * 1024 * kLayers;
    const auto gradients = [] {
      return core::memory_stats({}).of(core::MemoryCategory::gradients);
    };
    for (int step = 0; step < 3; ++step) {
      core::reset_peak_memory({});
      precision.backward(model.run(net, waves({4, kWidth}, 0.3)).square().mean());
      EXPECT_NEAR(gradients(), kLayers * kLayer / 2, kUneven);
      const std::size_t peak = core::memory_stats({}).peak_of(core::MemoryCategory::gradients);
      EXPECT_LE(peak, kLayers * kLayer / 2 + 3 * kLayer + kUneven);
      for (const auto& weight : net->parameters()) {
        EXPECT_TRUE(weight.grad().is_meta());
        EXPECT_EQ(weight.grad().sizes(), weight.sizes());
      }
      const optim::StepResult stepped = precision.step();
      EXPECT_TRUE(stepped.applied) << stepped.reason;
      EXPECT_EQ(gradients(), 0U);
      for (const auto& weight : net->parameters()) EXPECT_FALSE(weight.grad().defined());
    }
  });
}

// No rank has all of a gradient: who would read or write it hears so, and who drops it is followed.
TEST(LibtorchSharding, OfGradientsHasNoneToEdit) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    Trainer sharded(group, amp::OptLevel::O2, kGradients),
        plain(group, amp::OptLevel::O2, parallel::DistributedOptions{});
    sharded.backward(7);
    const auto weights = sharded.net->parameters();
    EXPECT_THROW((void)torch::nn::utils::clip_grad_norm_(weights, 0.1), c10::Error);
    EXPECT_THROW(torch::nn::utils::clip_grad_value_(weights, 0.1), c10::Error);
    EXPECT_THROW((void)weights[0].grad().norm().item<float>(), c10::Error);
    EXPECT_THROW(weights[0].grad().mul_(0.5), c10::Error);
    sharded.net->zero_grad(/*set_to_none=*/false);
    EXPECT_THAT(message_of<core::InvalidArgument>([&] { (void)sharded.precision.step(); }),
                HasSubstr("of which this rank has a part, got .grad written"));
    sharded.net->zero_grad();
    for (Trainer* one : {&sharded, &plain}) EXPECT_TRUE(one->step(1).applied);
    expect_same_bits(sharded, plain);
  });
}

// Of another stage, and another number of ranks.
TEST(LibtorchSharding, ResumesInAnyForm) {
  const auto folder = std::filesystem::temp_directory_path() /
                      core::str("cairn-libtorch-sharding-", getuid(), "-", getpid());
  for (const ZeroStage stage : kStages) {
    std::filesystem::remove_all(folder);
    std::vector<torch::Tensor> saved;  // weights, by rank 0
    run_threads(2, [&](parallel::ProcessGroup& group) {
      Trainer first(group, amp::OptLevel::O2, parallel::ShardedOptions{.stage = stage});
      for (int i = 0; i < 3; ++i) (void)first.step(i);
      first.state.save(folder.string(), 3);
      if (group.rank() == 0) saved = first.weights();
      Trainer states(group, amp::OptLevel::O2, parallel::ShardedOptions{}),
          gradients(group, amp::OptLevel::O2, kGradients),
          plain(group, amp::OptLevel::O2, parallel::DistributedOptions{});
      for (Trainer* one : {&states, &gradients, &plain})
        ASSERT_TRUE(one->state.resume_latest(folder.string()));
      for (int i = 3; i < 6; ++i) {
        for (Trainer* one : {&first, &states, &gradients, &plain})
          EXPECT_TRUE(one->step(i).applied);
        for (Trainer* one : {&states, &gradients, &plain}) expect_same_bits(*one, first);
      }
    });
    run_threads(3, [&](parallel::ProcessGroup& group) {
      Trainer sharded(group, amp::OptLevel::O2, parallel::ShardedOptions{.stage = stage}),
          plain(group, amp::OptLevel::O2, parallel::DistributedOptions{});
      for (Trainer* one : {&sharded, &plain}) {
        ASSERT_TRUE(one->state.resume_latest(folder.string()));
        const auto weights = one->weights();
        for (std::size_t i = 0; i < saved.size(); ++i)
          EXPECT_TRUE(torch::equal(weights[i], saved[i])) << i;
      }
      for (int i = 3; i < 5; ++i) {
        for (Trainer* one : {&sharded, &plain}) EXPECT_TRUE(one->step(i).applied);
        expect_same_bits(sharded, plain);
      }
    });
  }
  std::filesystem::remove_all(folder);
}

TEST(LibtorchSharding, OfLibtorchsOptimizersIsUnsupported) {
  WideNet net;
  libtorch::Model model(*net, parallel::ProcessGroup::single(), parallel::ShardedOptions{});
  torch::optim::Adam adam(net->parameters());
  EXPECT_THAT(
      message_of<core::Unsupported>([&] { const libtorch::TorchOptimizer mine(model, adam); }),
      HasSubstr("expected one of Cairn's optimizers"));
}

TEST(LibtorchSharding, OfWeightsIsUnsupported) {
  WideNet net;
  EXPECT_THAT(message_of<core::Unsupported>([&] {
                const libtorch::Model model(
                    *net, parallel::ProcessGroup::single(),
                    parallel::ShardedOptions{.stage = ZeroStage::parameters});
              }),
              HasSubstr("expected ZeroStage::optimizer_states or gradients, got parameters"));
}

}  // namespace
}  // namespace cairn::test
