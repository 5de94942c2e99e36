// Hybrid sharding: groups of ranks that divide one copy each, and what they tell each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/core/memory.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using parallel::ShardedDataParallel;
using parallel::ZeroStage;
using ::testing::HasSubstr;

TEST(HybridSharding, OfAnotherNumberOfRanksNamesBoth) {
  test::run_threads(3, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    for (const int within : {2, 4, -1}) {
      EXPECT_THAT(test::message_of<core::InvalidArgument>(
                      [&] { ShardedDataParallel(net, group, {.shard_within = within}); }),
                  HasSubstr(core::str("to divide the number of ranks, 3, got ", within)));
    }
    EXPECT_THAT(test::message_of<core::InvalidArgument>(
                    [&] { (void)parallel::Reducer(group, {.shard = true, .shard_within = 2}); }),
                HasSubstr("to divide the number of ranks, 3, got 2"));
    EXPECT_THAT(test::message_of<core::InvalidArgument>(
                    [&] { (void)parallel::Reducer(group, {.shard_within = 3}); }),
                HasSubstr("expected shard_within with shard alone"));
    group.barrier();  // it lives
  });
}

TEST(HybridSharding, ThatRanksDoNotShareNamesBoth) {
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    const int within = group.rank() == 3 ? 4 : 2;
    EXPECT_THAT(test::message_of<core::InvalidArgument>(
                    [&] { ShardedDataParallel(net, group, {.shard_within = within}); }),
                HasSubstr("on all ranks, got 2 on rank 0 and 4 on rank 3"));
  });
}

TEST(HybridSharding, OnGpusHasOneCommunicatorAtWork) {
  if (!core::default_device().is_cuda()) GTEST_SKIP() << "of GPUs";
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(30, 40), nn::Linear(40, 30));
    nn::Sequential synced(nn::Linear(30, 40), parallel::SyncBatchNorm(40, group));
    for (parallel::ShardedOptions options :
         {parallel::ShardedOptions{.stage = ZeroStage::gradients, .shard_within = 2},
          parallel::ShardedOptions{.stage = ZeroStage::parameters, .shard_within = 2},
          parallel::ShardedOptions{.stage = ZeroStage::parameters, .reshard_within = 2}}) {
      EXPECT_THAT(
          test::message_of<core::Unsupported>([&] { ShardedDataParallel(synced, group, options); }),
          HasSubstr("expected no SyncBatchNorm"));
      ShardedDataParallel(net, group, options);
      options.distributed.num_allreduce_streams = 2;
      EXPECT_THAT(
          test::message_of<core::Unsupported>([&] { ShardedDataParallel(net, group, options); }),
          HasSubstr("expected one stream"));
    }
    parallel::Reducer copies(group, {.num_allreduce_streams = 2, .shard = true, .shard_within = 1});
    EXPECT_THAT(test::message_of<core::Unsupported>([&] {
                  copies.register_gradients({{"gradient", Tensor::zeros({8})}});
                }),
                HasSubstr("one stream for shard_within on GPUs"));
    group.barrier();  // it lives
  });
}

// Its gathers of weights follow the reductions, whatever streams those take.
TEST(HybridSharding, OfStatesTakesSeveralStreams) {
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(30, 40), nn::Linear(40, 30));
    parallel::ShardedOptions options{.stage = ZeroStage::optimizer_states, .shard_within = 2};
    options.distributed.num_allreduce_streams = 2;
    options.distributed.first_bucket_bytes = options.distributed.bucket_bytes = 1000;
    ShardedDataParallel sharded(net, group, options);
    optim::FusedAdam optimizer(net.parameters());
    for (int step = 0; step < 3; ++step) {
      autograd::backward(
          autograd::mse_loss(sharded(Tensor::full({4, 30}, 0.1)), Tensor::full({4, 30}, 0.2)));
      test::expect_applied(optimizer.step());
    }
    group.wait();
  });
}

// Parts of a gradient that pieces cut anywhere, at their ends and in the zeros between.
TEST(HybridReducer, HandsOutPartsOfEachCopy) {
  struct Form {
    int ranks, within;
  };
  for (const Form form : {Form{4, 2}, Form{6, 3}, Form{6, 2}, Form{3, 1}, Form{2, 2}}) {
    const bool on_gpus = core::default_device().is_cuda();
    if (on_gpus && form.ranks > core::device_count(core::DeviceType::cuda)) continue;
    SCOPED_TRACE(core::str(form.ranks, " by ", form.within));
    test::run_threads(form.ranks, [&](parallel::ProcessGroup& group) {
      parallel::Reducer reducer(group, {.first_bucket_bytes = 1 << 14,
                                        .bucket_bytes = 1 << 14,
                                        .average = false,
                                        .shard = true,
                                        .shard_within = form.within});
      const std::vector<std::int64_t> sizes = {5, 2048, 4000, 1, 3073, 1024};
      NamedTensors gradients;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        std::vector<float> values;
        for (std::int64_t k = 0; k < sizes[i]; ++k)
          values.push_back(static_cast<float>(3 * k + group.rank()));
        gradients.push_back({core::str("g", i), Tensor::from(values, {sizes[i]})});
      }
      reducer.register_gradients(gradients);
      EXPECT_GT(reducer.buckets().size(), 2u);
      std::vector<Tensor> parts(sizes.size());
      reducer.on_part([&](std::size_t i, const Tensor& part) { parts[i] = part; });
      const int n = form.ranks, shard = group.rank() % form.within;
      for (int pass = 0; pass < 3; ++pass) {
        for (std::size_t i = 0; i < sizes.size(); ++i)
          i == 3 ? reducer.mark_unused(i) : reducer.mark_ready(i);
        reducer.wait();
        for (std::size_t i = 0; i < sizes.size(); ++i) {
          const auto own = core::even_part(sizes[i], shard, form.within);
          std::vector<double> expected;
          for (std::int64_t k = own.begin; k < own.end; ++k)
            expected.push_back(i == 3 ? 0.0 : static_cast<double>(3 * k * n + n * (n - 1) / 2));
          EXPECT_EQ(parts[i].to_vector(), expected) << i << " pass " << pass;
        }
      }
    });
  }
}

// A rank that cannot update is heard of by those that hold copies of its part, and by all others.
TEST(HybridRanks, AFailedUpdateReachesEveryGroup) {
  test::run_ranks(4, [](parallel::ProcessGroup& group) {
    nn::Sequential net(nn::Linear(301, 407), nn::Linear(407, 299));
    ShardedDataParallel sharded(net, group, {.shard_within = 2});
    optim::FusedAdam optimizer(net.parameters());
    const auto backward = [&] {
      autograd::backward(
          autograd::mse_loss(sharded(Tensor::full({4, 301}, 0.1)), Tensor::full({4, 299}, 0.2)));
    };
    const std::string said = test::message_of<core::Error>([&] {
      backward();
      const auto held = core::memory_stats(core::default_device()).current_total;
      if (group.rank() == 3) core::set_memory_capacity(core::default_device(), held + (1 << 16));
      (void)optimizer.step();
      backward();  // where a group whose ranks are well goes on to meet the others
    });
    core::set_memory_capacity(core::default_device(), SIZE_MAX);
    const char* expected = group.rank() == 3 ? "what the capacity leaves" : "its update failed";
    EXPECT_THAT(said, HasSubstr(expected));
  });
}

// Each group gathers what its own ranks use; what they have no gradient of is an error of all.
TEST(HybridRanks, OfGroupsThatRunOtherGraphsAreAnErrorOfAll) {
  class TwoBranches : public nn::Module {
   public:
    TwoBranches()
        : a_(add_module("a", nn::Linear(test::kInputs, 400))),
          b_(add_module("b", nn::Linear(test::kInputs, 400))) {}
    std::string kind() const override { return "TwoBranches"; }
    Tensor forward(const Tensor& x) override { return first ? (*a_)(x) : (*b_)(x); }
    bool first = true;

   private:
    std::shared_ptr<nn::Linear> a_, b_;
  };
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    TwoBranches net;
    net.first = group.rank() < 2;
    ShardedDataParallel sharded(net, group, {.stage = ZeroStage::parameters, .shard_within = 2});
    const Tensor y = sharded(test::inputs(group, 1));
    EXPECT_THAT(test::message_of<core::Error>([&] { autograd::backward(test::loss_of(y)); }),
                HasSubstr("expected a gradient for every parameter"));
  });
}

}  // namespace
}  // namespace cairn
