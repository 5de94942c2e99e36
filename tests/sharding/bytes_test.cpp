// What a rank sends in a step, on a mesh that counts: as docs/sharding.md says.
#include <gtest/gtest.h>

#include "collectives/cpu/mesh_collectives.h"
#include "collectives/meshes.h"
#include "group/coordinator.h"
#include "group/group_impl.h"
#include "sharding/training.h"

namespace cairn {
namespace {

using parallel::ZeroStage;
using test::Post;

/// Threads over a post that counts. Nobody watches them.
class CountingCoordinator : public parallel::Coordinator {
 public:
  CountingCoordinator(Post& post, int rank, parallel::OnFailure on_failure)
      : post_(post), rank_(rank), on_failure_(std::move(on_failure)) {}
  void add(const std::shared_ptr<parallel::History>& /*history*/) override {}
  void break_group(const std::string& reason) override { on_failure_(reason); }
  void leave() noexcept override {}
  std::unique_ptr<parallel::Collectives> connect(Device /*device*/,
                                                 const parallel::Members& /*members*/) override {
    return parallel::make_mesh_collectives(std::make_unique<test::CountingMesh>(post_, rank_));
  }

 private:
  Post& post_;
  int rank_;
  parallel::OnFailure on_failure_;
};

parallel::ProcessGroup counting_group(Post& post, int rank) {
  parallel::JobEnvironment job;
  job.rank = job.local_rank = rank;
  job.world_size = job.local_world_size = post.size();
  const auto join = [&](parallel::OnFailure on_failure, const parallel::CheckDevices& /*check*/) {
    return std::make_unique<CountingCoordinator>(post, rank, std::move(on_failure));
  };
  return parallel::ProcessGroup(
      std::make_shared<parallel::ProcessGroup::Impl>(job, parallel::GroupOptions{}, join));
}

constexpr std::int64_t kWideLayer = 256, kWideLayers = 6;

/// By rank; of the third step, in which buckets and units have found their order.
std::vector<double> bytes_of_step(int ranks, test::Stage stage) {
  Post post(ranks);
  std::vector<double> bytes(static_cast<std::size_t>(ranks));
  test::in_threads(ranks, [&](int rank) {
    const parallel::ProcessGroup group = counting_group(post, rank);
    nn::Sequential net;
    for (std::int64_t i = 0; i < kWideLayers; ++i) net.add(nn::Linear(kWideLayer, kWideLayer));
    const auto ddp = test::data_parallel(net, group, stage);
    optim::FusedAdam optimizer(net.parameters());
    amp::Amp precision = amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = ddp->world()});
    for (int step = 0; step < 3; ++step) {
      const std::size_t before = post.count(rank).bytes;
      precision.backward(test::loss_of((*ddp)(test::inputs(group, 1, kWideLayer))));
      ASSERT_TRUE(precision.step().applied);
      bytes[static_cast<std::size_t>(rank)] = static_cast<double>(post.count(rank).bytes - before);
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
  const auto expect = [&](test::Stage stage, double times) {
    SCOPED_TRACE(core::str("stage ", stage ? static_cast<int>(*stage) : 0));
    const std::vector<double> bytes = bytes_of_step(ranks, stage);
    EXPECT_NEAR(sum_of(bytes), times * once, 0.03 * once);  // and what ranks say of their parts
    for (const double own : bytes)
      EXPECT_NEAR(own, times * once / ranks, times * cut + 0.03 * once);
  };
  expect(test::kPlain, 2);
  expect(test::kStates, 3);
  expect(test::kGradients, 2);
  expect(test::kParameters, 3);
}

INSTANTIATE_TEST_SUITE_P(, BytesOfAStep, testing::Values(2, 3, 4),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace cairn
