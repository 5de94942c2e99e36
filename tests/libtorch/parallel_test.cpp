// Two ranks are one: gradients, unused parameters, accumulation, synchronised batch norm, files.
#include <gmock/gmock.h>

#include "cairn/libtorch/sync_batch_norm.h"
#include "libtorch/support.h"
#include "parallel/ranks.h"
#include "support/message_of.h"

namespace cairn::test {
namespace {

using amp::OptLevel;
using ::testing::HasSubstr;

struct SyncNetImpl : torch::nn::Module {
  explicit SyncNetImpl(const parallel::ProcessGroup& group)
      : conv(register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)))),
        norm(register_module("norm",
                             libtorch::SyncBatchNorm(torch::nn::BatchNormOptions(4), group))),
        fc(register_module("fc", torch::nn::Linear(4 * 3 * 3, 5))),
        spare(register_module("spare", torch::nn::Linear(2, 2))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(norm->forward(conv->forward(x))), 2);
    return torch::log_softmax(fc->forward(x.flatten(1)), 1);
  }
  torch::nn::Conv2d conv;
  libtorch::SyncBatchNorm norm;
  torch::nn::Linear fc, spare;
};
TORCH_MODULE(SyncNet);

struct Outcome {
  std::vector<float> weights, statistics;
  std::int64_t batches = 0;
};

/// Three steps of two micro-batches each; a rank sees its rows of each batch.
Outcome train(const parallel::ProcessGroup& group, const amp::Options& base,
              const std::vector<Batch>& batches) {
  SyncNet net(group);
  {
    const torch::NoGradGuard no_grad;
    std::uint64_t n = 0;
    for (auto& x : net->parameters())
      x.copy_(torch::sin(torch::arange(x.numel()) + ++n).reshape(x.sizes()) * 0.3);
  }
  libtorch::Model model(
      *net, group,
      {.first_bucket_bytes = 128, .bucket_bytes = 512, .find_unused_parameters = true});
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
  amp::Options options = base;
  options.world = model.world();
  auto precision = libtorch::initialize(model, optimizer, options);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const bool last = i % 2 == 1;
    const std::int64_t rows = batches[i].data.size(0) / group.world_size(),
                       first = group.rank() * rows;
    const auto part = [&](const torch::Tensor& x) { return x.slice(0, first, first + rows); };
    const auto no_sync = model.no_sync(!last);
    const auto y =
        model.run([&](const torch::Tensor& x) { return net->forward(x); }, part(batches[i].data));
    precision.backward(torch::nll_loss(y, part(batches[i].target)));
    if (last) {
      EXPECT_TRUE(precision.step({.gradient_scale = 0.5}).applied);
    }
  }
  if (model.ddp() != nullptr) {
    EXPECT_GT(model.ddp()->buckets().size(), 1u);
    for (const auto& bucket : model.ddp()->buckets()) EXPECT_TRUE(bucket.in_place);
    EXPECT_THAT(model.ddp()->unused_parameters(),
                ::testing::ElementsAre("spare.weight", "spare.bias"));
  }
  Outcome outcome;
  for (const auto& [name, tensor] : model.parameters()) {
    const auto values = kernels::master_value(tensor).to_vector<float>();
    outcome.weights.insert(outcome.weights.end(), values.begin(), values.end());
  }
  outcome.statistics = libtorch::to_cairn(net->norm->running_var).to_vector<float>();
  outcome.batches = net->norm->num_batches_tracked.item<std::int64_t>();
  return outcome;
}

std::vector<Batch> six_batches() {
  std::vector<Batch> batches;
  for (std::uint64_t i = 0; i < 6; ++i) batches.push_back(batch_of(8, i));
  return batches;
}

void expect_near(const std::vector<float>& got, const std::vector<float>& expected, double bound) {
  ASSERT_EQ(got.size(), expected.size());
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    largest = std::max<double>(largest, std::abs(got[i] - expected[i]));
  EXPECT_LE(largest, bound);
}

TEST(LibtorchRanks, TwoThreadsAreOne) {
  const auto batches = six_batches();
  for (const OptLevel level : {OptLevel::O0, OptLevel::O2}) {
    const amp::Options options{.opt_level = level, .half_dtype = DType::bf16};
    const double bound = level == OptLevel::O0 ? 2e-4 : 0.05;
    const Outcome one = train(parallel::ProcessGroup::single(), options, batches);
    std::vector<Outcome> two(2);
    run_threads(2, [&](parallel::ProcessGroup& group) {
      two[static_cast<std::size_t>(group.rank())] = train(group, options, batches);
    });
    EXPECT_EQ(two[0].weights, two[1].weights) << "the same bits";
    EXPECT_EQ(two[0].statistics, two[1].statistics);
    EXPECT_EQ(two[0].batches, 6);
    expect_near(two[0].weights, one.weights, bound);
    expect_near(two[0].statistics, one.statistics, level == OptLevel::O0 ? 1e-5 : 0.02);
  }
}

TEST(LibtorchRanks, TwoProcessesAreOne) {
  const auto batches = six_batches();
  run_ranks(2, [&](parallel::ProcessGroup& group) {
    const amp::Options options{.opt_level = OptLevel::O0};
    const Outcome two = train(group, options, batches),
                  one = train(parallel::ProcessGroup::single(), options, batches);
    expect_near(two.weights, one.weights, 2e-4);
  });
}

TEST(LibtorchRanks, NameWhatTheLossDoesNotReach) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    SyncNet net(group);
    libtorch::Model model(*net, group);
    const auto y = model.run([&](const torch::Tensor& x) { return net->forward(x); },
                             torch::ones({4, 1, 8, 8}));
    EXPECT_THAT(message_of<core::Error>([&] { model.backward(y.sum()); }),
                HasSubstr("spare.weight"));
  });
}

TEST(LibtorchSyncBatchNorm, IsLibtorchsOverAllRows) {
  torch::manual_seed(4);
  const auto x = torch::randn({8, 3, 4}), dy = torch::randn({8, 3, 4});
  torch::nn::BatchNorm1d plain(3);
  const auto leaf = x.clone().requires_grad_();
  plain->forward(leaf).backward(dy);
  std::vector<torch::Tensor> dx(2), dweight(2);
  run_threads(2, [&](parallel::ProcessGroup& group) {
    libtorch::SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group);
    const auto rank = static_cast<std::size_t>(group.rank());
    const auto own = x.slice(0, group.rank() * 4, group.rank() * 4 + 4).clone().requires_grad_();
    norm->forward(own).backward(dy.slice(0, group.rank() * 4, group.rank() * 4 + 4));
    dx[rank] = own.grad();
    dweight[rank] = norm->weight.grad();
    EXPECT_LE(difference(norm->running_var, plain->running_var), 1e-5);
    norm->eval();
    EXPECT_EQ(norm->forward(own).sizes(), own.sizes());
  });
  EXPECT_LE(difference(torch::cat(dx), leaf.grad()), 1e-5);
  EXPECT_LE(difference(dweight[0] + dweight[1], plain->weight.grad()), 1e-5);
}

}  // namespace
}  // namespace cairn::test
