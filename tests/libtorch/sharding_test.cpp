// Optimizer states that libtorch's modules divide among ranks: the bits of data parallel training,
// half the memory, and states that either way of training resumes.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>

#include "cairn/checkpointing/training_state.h"
#include "cairn/core/memory.h"
#include "cairn/libtorch/optimizer.h"
#include "libtorch/support.h"
#include "parallel/ranks.h"
#include "support/message_of.h"

namespace cairn::test {
namespace {

using parallel::ZeroStage;
using ::testing::HasSubstr;

/// Ranks are threads, and libtorch's generator is one for all of them.
torch::Tensor waves(torch::IntArrayRef shape, double frequency) {
  return torch::sin(torch::arange(c10::multiply_integers(shape)) * frequency).reshape(shape);
}

struct WideNetImpl : torch::nn::Module {
  WideNetImpl()
      : fc1(register_module("fc1", torch::nn::Linear(64, 139))),
        fc2(register_module("fc2", torch::nn::Linear(139, 5))) {
    const torch::NoGradGuard no_grad;
    for (auto& weight : parameters()) weight.copy_(waves(weight.sizes(), 0.7) * 0.2);
  }
  torch::Tensor forward(torch::Tensor x) { return fc2->forward(torch::tanh(fc1->forward(x))); }
  torch::nn::Linear fc1, fc2;
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
    const auto x = waves({4, 64}, 0.3 + static_cast<double>(3 * number + rank_));
    const auto y = model.run([&](const torch::Tensor& in) { return net->forward(in); }, x);
    precision.backward((y * y).mean() * factor);
    return precision.step();
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

TEST(LibtorchSharding, HasTheBitsOfDataParallelTraining) {
  for (const auto level : {amp::OptLevel::O0, amp::OptLevel::O2}) {
    run_threads(3, [&](parallel::ProcessGroup& group) {
      Trainer sharded(group, level, parallel::ShardedOptions{}),
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

TEST(LibtorchSharding, ResumesEitherWay) {
  const auto folder = std::filesystem::temp_directory_path() /
                      core::str("cairn-libtorch-sharding-", getuid(), "-", getpid());
  std::filesystem::remove_all(folder);
  run_threads(2, [&](parallel::ProcessGroup& group) {
    Trainer first(group, amp::OptLevel::O2, parallel::ShardedOptions{});
    for (int i = 0; i < 3; ++i) (void)first.step(i);
    first.state.save(folder.string(), 3);
    Trainer sharded(group, amp::OptLevel::O2, parallel::ShardedOptions{}),
        plain(group, amp::OptLevel::O2, parallel::DistributedOptions{});
    ASSERT_TRUE(sharded.state.resume_latest(folder.string()));
    ASSERT_TRUE(plain.state.resume_latest(folder.string()));
    for (int i = 3; i < 6; ++i) {
      for (Trainer* one : {&first, &sharded, &plain}) EXPECT_TRUE(one->step(i).applied);
      expect_same_bits(sharded, first);
      expect_same_bits(plain, first);
    }
  });
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

TEST(LibtorchSharding, OfMemoryThatLibtorchKeepsIsUnsupported) {
  WideNet net;
  for (const auto stage : {ZeroStage::gradients, ZeroStage::parameters}) {
    EXPECT_THAT(message_of<core::Unsupported>([&] {
                  const libtorch::Model model(*net, parallel::ProcessGroup::single(),
                                              parallel::ShardedOptions{.stage = stage});
                }),
                HasSubstr("expected ZeroStage::optimizer_states"));
  }
}

}  // namespace
}  // namespace cairn::test
