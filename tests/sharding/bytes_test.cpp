// What a rank sends in a step, on a mesh that counts: as docs/sharding.md says.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>

#include "collectives/cpu/mesh_collectives.h"
#include "collectives/meshes.h"
#include "group/coordinator.h"
#include "group/group_impl.h"
#include "sharding/training.h"

namespace cairn {
namespace {

using parallel::ZeroStage;
using test::Post;

/// Of a job, and of each group that it is split into.
class Posts {
 public:
  explicit Posts(int ranks) : ranks_(ranks) {}
  int ranks() const { return ranks_; }
  Post& of(const parallel::Members& members) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = all_.try_emplace(members.id, members.ranks, nullptr);
    if (is_new) place->second.second = std::make_unique<Post>(members.size());
    return *place->second.second;
  }
  /// That a rank has sent to the whole job, or within groups.
  std::size_t bytes(int rank, bool of_groups) {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [id, one] : all_) {
      const auto place = std::find(one.first.begin(), one.first.end(), rank);
      if ((id != 0) == of_groups && place != one.first.end())
        sum += one.second->count(static_cast<int>(place - one.first.begin())).bytes;
    }
    return sum;
  }

 private:
  int ranks_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::pair<std::vector<int>, std::unique_ptr<Post>>> all_;  // by id
};

/// Threads over posts that count. Nobody watches them.
class CountingCoordinator : public parallel::Coordinator {
 public:
  CountingCoordinator(Posts& posts, parallel::OnFailure on_failure)
      : posts_(posts), on_failure_(std::move(on_failure)) {}
  void add(const std::shared_ptr<parallel::History>& /*history*/) override {}
  void break_group(const std::string& reason) override { on_failure_(reason); }
  void leave() noexcept override {}
  std::unique_ptr<parallel::Collectives> connect(Device /*device*/,
                                                 const parallel::Members& members) override {
    return parallel::make_mesh_collectives(
        std::make_unique<test::CountingMesh>(posts_.of(members), members.place));
  }

 private:
  Posts& posts_;
  parallel::OnFailure on_failure_;
};

parallel::ProcessGroup counting_group(Posts& posts, int rank) {
  parallel::JobEnvironment job;
  job.rank = job.local_rank = rank;
  job.world_size = job.local_world_size = posts.ranks();
  const auto join = [&](parallel::OnFailure on_failure, const parallel::CheckDevices& /*check*/) {
    return std::make_unique<CountingCoordinator>(posts, std::move(on_failure));
  };
  return parallel::ProcessGroup(
      std::make_shared<parallel::ProcessGroup::Impl>(job, parallel::GroupOptions{}, join));
}

constexpr std::int64_t kWideLayer = 256, kWideLayers = 6;

struct SentBytes {
  std::vector<double> to_all, within_groups;  // by rank
};

/// Of the third step, in which buckets and units have found their order.
SentBytes bytes_of_step(int ranks, test::Stage stage, const parallel::ShardedOptions& options) {
  Posts posts(ranks);
  SentBytes bytes;
  bytes.to_all.resize(static_cast<std::size_t>(ranks));
  bytes.within_groups.resize(static_cast<std::size_t>(ranks));
  test::in_threads(ranks, [&](int rank) {
    const parallel::ProcessGroup group = counting_group(posts, rank);
    nn::Sequential net;
    for (std::int64_t i = 0; i < kWideLayers; ++i) net.add(nn::Linear(kWideLayer, kWideLayer));
    const auto ddp = test::data_parallel(net, group, stage, options);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = ddp->world()});
    for (int step = 0; step < 3; ++step) {
      const std::size_t before = posts.bytes(rank, false), within = posts.bytes(rank, true);
      precision.backward(test::loss_of((*ddp)(test::inputs(group, 1, kWideLayer))));
      ASSERT_TRUE(precision.step().applied);
      const auto place = static_cast<std::size_t>(rank);
      bytes.to_all[place] = static_cast<double>(posts.bytes(rank, false) - before);
      bytes.within_groups[place] = static_cast<double>(posts.bytes(rank, true) - within);
    }
  });
  return bytes;
}

double sum_of(const std::vector<double>& all) {
  double sum = 0;
  for (const double one : all) sum += one;
  return sum;
}

class BytesOfAStep : public testing::TestWithParam<int> {};

TEST_P(BytesOfAStep, AreThoseOfDistributedDataParallelOrHalfAsManyAgain) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "counts messages of the CPU's";
  const int ranks = GetParam();
  const double half_weights = 2.0 * kWideLayers * (kWideLayer * kWideLayer + kWideLayer);
  const double once = half_weights * (ranks - 1);  // a gather, or a reduce_scatter, of all ranks
  const double cut = 2.0 * 1024 * 2 * kWideLayers * ranks;
  const auto expect = [&](test::Stage stage, double times, double within_groups = 0,
                          const parallel::ShardedOptions& options = {}) {
    SCOPED_TRACE(core::str("stage ", stage ? static_cast<int>(*stage) : 0, ", ", times));
    const SentBytes bytes = bytes_of_step(ranks, stage, options);
    EXPECT_NEAR(sum_of(bytes.to_all), times * once, 0.03 * once);  // and what ranks say of parts
    EXPECT_NEAR(sum_of(bytes.within_groups), within_groups * once, 0.001 * once);
    for (const double own : bytes.to_all)
      EXPECT_NEAR(own, times * once / ranks, times * cut + 0.03 * once);
  };
  expect(test::kPlain, 2);
  expect(test::kStates, 3);
  expect(test::kGradients, 2);
  expect(test::kParameters, 3);
  expect(test::kParameters, 2, 0, {.reshard_after_forward = false});
  expect(test::kParameters, 2, 0, {.reshard_within = 1});
  parallel::ShardedOptions finds_unused;
  finds_unused.distributed.find_unused_parameters = true;
  expect(test::kParameters, 3, 0, finds_unused);
  finds_unused.reshard_after_forward = false;
  expect(test::kParameters, 2, 0, finds_unused);
  if (ranks == 4) expect(test::kParameters, 2, 2.0 / 3, {.reshard_within = 2});  // 1 - 1 / 2
}

INSTANTIATE_TEST_SUITE_P(, BytesOfAStep, testing::Values(2, 3, 4),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace cairn
