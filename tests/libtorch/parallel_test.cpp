// Two ranks are one: gradients, unused parameters, accumulation, synchronised batch norm, files.
#include <gmock/gmock.h>

#include <limits>
#include <optional>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/libtorch/sync_batch_norm.h"
#include "cairn/optim/sgd.h"
#include "libtorch/support.h"
#include "parallel/ranks.h"
#include "support/message_of.h"
#include "support/near.h"

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
  if (group.world_size() > 1) {
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

struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl()
      : a(register_module("a", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)))),
        b(register_module("b", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)))) {}
  torch::nn::Linear a, b;
};
TORCH_MODULE(TwoParts);

/// Rank 0's loss reaches a alone, whose gradient is {1, 1}, rank 1's both.
torch::Tensor uneven_loss(libtorch::Model& model, TwoParts& net, int rank) {
  const auto forward = [&](const torch::Tensor& x) {
    return rank == 0 ? net->a->forward(x) : net->a->forward(x) + net->b->forward(x);
  };
  return model.run(forward, torch::ones({1, 2})).sum();
}

TEST(LibtorchRanks, ZeroGradClearsWhatOnlyAnotherRanksLossReaches) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    for (const bool average : {true, false}) {
      TwoParts net;
      libtorch::Model model(*net, group, {.average = average, .find_unused_parameters = true});
      optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
      auto precision = libtorch::initialize(model, optimizer,
                                            {.opt_level = OptLevel::O0, .world = model.world()});
      for (int k = 0; k < (average ? 2 : 1);
           ++k) {  // the second loss finds what the first one left
        precision.backward(uneven_loss(model, net, group.rank()));
        ASSERT_TRUE(net->b->weight.grad().defined())
            << "rank " << group.rank() << ", backward " << k;
      }
      net->zero_grad();
      EXPECT_FALSE(precision.step().applied) << "rank " << group.rank();
      precision.backward(uneven_loss(model, net, group.rank()));
      EXPECT_TRUE(precision.step().applied) << "rank " << group.rank();
    }
  });
}

/// What a plain step brings from another rank and does not take.
TEST(LibtorchRanks, APlainStepThatThrowsShowsWhatItHasBrought) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    TwoParts net;
    libtorch::Model model(*net, group, {.find_unused_parameters = true});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    {
      const auto no_sync = model.no_sync();
      model.backward(uneven_loss(model, net, group.rank()) *
                     std::numeric_limits<float>::infinity());
    }
    ASSERT_EQ(net->b->weight.grad().defined(), group.rank() == 1);
    EXPECT_THAT(
        message_of<core::Error>([&] { (void)optimizer.step({.error_if_nonfinite = true}); }),
        HasSubstr("a.weight"));
    ASSERT_TRUE(net->b->weight.grad().defined()) << "rank " << group.rank();
    net->zero_grad();
    EXPECT_FALSE(optimizer.step().applied) << "rank " << group.rank();
    model.backward(uneven_loss(model, net, group.rank()));
    EXPECT_TRUE(optimizer.step().applied) << "rank " << group.rank();
  });
}

TEST(LibtorchRanks, OneWithoutABatchKnowsWhatWasFrozen) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    TwoParts net;
    libtorch::Model model(*net, group);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    const auto before = net->b->weight.clone();
    for (const bool frozen : {true, false}) {
      net->a->weight.set_requires_grad(!frozen);
      auto join = model.ddp()->join();
      if (group.rank() == 1) {
        const auto forward = [&](const torch::Tensor& x) {
          return net->a->forward(x) + net->b->forward(x);
        };
        model.backward(model.run(forward, torch::ones({1, 2})).sum());
        (void)optimizer.step();
      }
      while (join.other_ranks_have_batches()) {
        model.backward(join.zero());
        (void)optimizer.step();
      }
    }
    EXPECT_LE(difference(net->b->weight, before - 2.0), 1e-6) << "rank " << group.rank();
  });
}

/// Each rank freezes a after its first step of the loop; rank 0 has no batch.
TEST(LibtorchRanks, FreezingInsideAJoinHoldsAtOnce) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    for (const bool by_amp : {true, false}) {
      TwoParts net;
      libtorch::Model model(*net, group);
      optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
      std::optional<libtorch::Amp> precision;
      if (by_amp) {
        precision.emplace(libtorch::initialize(
            model, optimizer, {.opt_level = OptLevel::O0, .world = model.world()}));
      }
      const auto a = net->a->weight.clone(), b = net->b->weight.clone();
      auto join = model.ddp()->join();
      for (int k = 0; k < 4; ++k) {  // a's: trained, frozen, frozen, trained
        if (k == 1) net->a->weight.set_requires_grad(false);
        const auto train = [&](const auto& loss) {
          by_amp ? precision->backward(loss) : model.backward(loss);
          EXPECT_EQ(net->a->weight.grad().defined(), k == 0 || k == 3)
              << "rank " << group.rank() << ", step " << k;
          EXPECT_TRUE((by_amp ? precision->step() : optimizer.step()).applied);
        };
        if (group.rank() == 1) {
          if (k == 3) net->a->weight.set_requires_grad(true);
          train(uneven_loss(model, net, 1));
        } else {
          ASSERT_TRUE(join.other_ranks_have_batches());
          if (k == 3) net->a->weight.set_requires_grad(true);
          train(join.zero());
        }
      }
      EXPECT_FALSE(join.other_ranks_have_batches());
      EXPECT_LE(difference(net->a->weight, a - 2.0), 1e-6) << "rank " << group.rank();
      EXPECT_LE(difference(net->b->weight, b - 4.0), 1e-6) << "rank " << group.rank();
    }
  });
}

TEST(LibtorchRanks, ZeroGradClearsWhatAZeroOfJoinHasBrought) {
  run_threads(2, [](parallel::ProcessGroup& group) {
    for (const bool by_amp : {true, false}) {
      TwoParts net;
      libtorch::Model model(*net, group);
      optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
      std::optional<libtorch::Amp> precision;
      if (by_amp) {
        precision.emplace(libtorch::initialize(
            model, optimizer, {.opt_level = OptLevel::O0, .world = model.world()}));
      }
      const auto backward = [&](const auto& loss) {
        by_amp ? precision->backward(loss) : model.backward(loss);
      };
      const auto before = net->b->weight.clone();
      auto join = model.ddp()->join();
      const auto loss = [&] { return uneven_loss(model, net, 1); };  // gradients are {1, 1}
      for (int k = 0; k < 2; ++k) {  // what the first backward leaves is cleared
        if (group.rank() == 1) {
          backward(loss());
        } else {
          ASSERT_TRUE(join.other_ranks_have_batches());
          backward(join.zero());
        }
        ASSERT_TRUE(net->b->weight.grad().defined()) << "rank " << group.rank();
        EXPECT_EQ(net->b->weight.grad().sum().item<float>(), 2.0f) << "rank " << group.rank();
        if (k == 0) net->zero_grad();
      }
      const bool applied = by_amp ? precision->step().applied : optimizer.step().applied;
      EXPECT_TRUE(applied) << "rank " << group.rank();
      EXPECT_LE(difference(net->b->weight, before - 1.0), 1e-6) << "rank " << group.rank();
      if (group.rank() == 1) {
        backward(loss());
      } else {
        ASSERT_TRUE(join.other_ranks_have_batches());
        backward(join.zero());
      }
      net->zero_grad();
      if (by_amp) {
        EXPECT_FALSE(precision->step().applied) << "rank " << group.rank();
      }
      EXPECT_FALSE(join.other_ranks_have_batches());
    }
  });
}

TEST(LibtorchRanks, ABackwardThatTheModelDoesNotSeeIsRefused) {
  TwoParts net;
  libtorch::Model model(*net);
  EXPECT_THAT(message_of<core::InvalidArgument>(
                  [&] { autograd::backward(autograd::sum(model.parameters()[0].tensor)); }),
              ::testing::AllOf(HasSubstr("'a.weight'"), HasSubstr("model.backward(")));
  EXPECT_FALSE(net->a->weight.grad().defined());
  model.backward(autograd::sum(model.parameters()[0].tensor));
  EXPECT_EQ(net->a->weight.grad().sum().item<float>(), 2.0f);
}

TEST(LibtorchRanks, OneHasADdpTooWhoseStateLoadsIntoTwo) {
  StateDict plan;
  {
    TwoParts net;
    libtorch::Model model(*net, parallel::ProcessGroup::single());
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1.0});
    auto join = model.ddp()->join();
    model.backward(uneven_loss(model, net, 1));
    (void)optimizer.step();
    EXPECT_FALSE(join.other_ranks_have_batches());
    plan = model.ddp()->state_dict();
  }
  run_threads(2, [&](parallel::ProcessGroup& group) {
    TwoParts net;
    libtorch::Model model(*net, group);
    model.ddp()->load_state_dict(plan);
    model.backward(uneven_loss(model, net, 1));
    EXPECT_EQ(net->b->weight.grad().sum().item<float>(), 2.0f);
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
