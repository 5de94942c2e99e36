// A profile of four processes: one file, in which the same collective is at the same time, and
// gradients go from their backward over their bucket to their update.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/observe/run.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/sharded.h"
#include "observe/trace_files.h"
#include "parallel/ranks.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using nlohmann::json;

constexpr int kTracedRanks = 4, kTracedLayers = 3;
constexpr std::int64_t kTracedWidth = 64,
                       kLayerBytes = 4 * (kTracedWidth * kTracedWidth + kTracedWidth);

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void train_traced(ProcessGroup& group, const std::string& folder, bool shard) {
  manual_seed(1);
  nn::Sequential model;
  for (int i = 0; i < kTracedLayers; ++i) model.add(nn::Linear(kTracedWidth, kTracedWidth));
  DistributedOptions options;
  options.first_bucket_bytes = options.bucket_bytes = kLayerBytes;  // a bucket a layer
  std::unique_ptr<DistributedDataParallel> ddp;
  if (shard)
    ddp = std::make_unique<ShardedDataParallel>(
        model, group, ShardedOptions{.stage = ZeroStage::gradients, .distributed = options});
  else
    ddp = std::make_unique<DistributedDataParallel>(model, group, options);
  optim::FusedSGD optimizer(model.parameters(), {.lr = 0.01});
  observe::Run run(folder, {.world = ddp->world(), .profile = observe::ProfiledSteps{3, 5}});
  const Tensor x =
      test::normal_tensor({32, kTracedWidth}, 2 + static_cast<std::uint64_t>(group.rank()));
  for (int step = 1; step <= 6; ++step) {
    autograd::backward(autograd::mean((*ddp)(x)));
    EXPECT_TRUE(optimizer.step().applied);
    group.all_reduce(Tensor::full({2}, 1, DType::f32, Device{}), ReduceOp::sum, "metric");
    run.step({{"code", 10 * step + group.rank()}, {"clock", seconds_now()}});
  }
}

class TraceOfRanks : public testing::TestWithParam<bool> {
 protected:
  void run() {
    const char* const given = std::getenv("CAIRN_TEST_FOLDER");
    const std::string path = given != nullptr ? given : folder_.string();
    setenv("CAIRN_TEST_FOLDER", path.c_str(), 1);
    test::run_ranks(kTracedRanks,
                    [&](ProcessGroup& group) { train_traced(group, path, GetParam()); });
    if (given == nullptr) unsetenv("CAIRN_TEST_FOLDER");
    is_rank_ = given != nullptr;
  }
  test::TemporaryFolder folder_;
  bool is_rank_ = false;
};

std::vector<json> slices_of(const json& trace, const std::string& process,
                            const std::string& kind) {
  std::vector<json> found;
  for (const json& slice : trace["slices"]) {
    if (slice["process"] == process && slice["kind"] == kind) found.push_back(slice);
  }
  return found;
}

std::string rank_name(int rank) {
  return "rank " + std::to_string(rank);
}

void expect_collectives_at_one_time(const json& trace) {
  std::map<std::pair<std::int64_t, std::string>, std::vector<json>> collectives;
  for (int rank = 0; rank < kTracedRanks; ++rank) {
    for (const json& slice : slices_of(trace, rank_name(rank), "collective"))
      collectives[{slice["args"]["sequence"].get<std::int64_t>(), slice["name"].get<std::string>()}]
          .push_back(slice);
  }
  EXPECT_GE(collectives.size(), 3u * (kTracedLayers + 1));
  for (const auto& [key, of_ranks] : collectives) {
    ASSERT_EQ(of_ranks.size(), static_cast<std::size_t>(kTracedRanks)) << key.second;
    std::int64_t last_begin = 0, first_end = std::numeric_limits<std::int64_t>::max();
    for (const json& slice : of_ranks) {
      last_begin = std::max<std::int64_t>(last_begin, slice["begin"]);
      first_end = std::min<std::int64_t>(first_end, slice["end"]);
    }
    EXPECT_LE(last_begin, first_end + 1'000'000) << key.second;  // nobody leaves before all came
  }
}

/// Processes of one machine have one clock, and each step told it, a moment ahead of its time in
/// the trace: what the trace makes of it must agree.
void expect_clocks_agree(const json& trace) {
  std::map<std::string, double> zeros;  // of each rank, by the step that told it most quickly
  for (const json& counter : trace["counters"]) {
    if (counter["track"] != "clock") continue;
    const double zero = counter["value"].get<double>() - 1e-9 * counter["time"].get<double>();
    double& most = zeros.try_emplace(counter["process"].get<std::string>(), zero).first->second;
    most = std::max(most, zero);
  }
  ASSERT_EQ(zeros.size(), static_cast<std::size_t>(kTracedRanks));
  for (const auto& [process, zero] : zeros) EXPECT_NEAR(zero, zeros["rank 0"], 1e-3) << process;
}

void expect_flows(const json& trace, const std::string& process) {
  const auto backward = slices_of(trace, process, "backward"),
             collectives = slices_of(trace, process, "collective"),
             updates = slices_of(trace, process, "update");
  ASSERT_EQ(updates.size(), 3u);
  const auto with = [](const std::vector<json>& slices, const json& flow) {
    std::vector<json> found;
    for (const json& slice : slices) {
      const auto& flows = slice["flows"];
      if (std::find(flows.begin(), flows.end(), flow) != flows.end()) found.push_back(slice);
    }
    return found;
  };
  int buckets = 0;
  for (const json& collective : collectives) {
    const std::string name = collective["name"];
    const bool bucket = name.find("gradients ") != std::string::npos;
    EXPECT_EQ(collective["flows"].size(), bucket ? 1u : 0u) << name;
    if (!bucket) continue;
    ++buckets;
    EXPECT_EQ(collective["args"]["bytes"], kLayerBytes) << name;
    const auto from = with(backward, collective["flows"][0]),
               to = with(updates, collective["flows"][0]);
    ASSERT_EQ(from.size(), 1u) << name;
    ASSERT_EQ(to.size(), 1u) << name;
    EXPECT_EQ(from[0]["name"], "linear");
    EXPECT_LE(from[0]["begin"], collective["begin"]);
    EXPECT_LE(collective["end"], to[0]["begin"]);
  }
  EXPECT_EQ(buckets, 3 * kTracedLayers);
  for (const json& update : updates) {
    EXPECT_EQ(update["name"], "FusedSGD");
    EXPECT_EQ(update["flows"].size(), static_cast<std::size_t>(kTracedLayers));
  }
}

TEST_P(TraceOfRanks, IsOneFileInWhichCollectivesMeet) {
  run();
  if (is_rank_) return;
  for (int rank = 0; rank < kTracedRanks; ++rank) {
    const std::string of_rank = rank == 0 ? "." : "rank-" + std::to_string(rank);
    const json own = test::chrome_trace_of(folder_ / of_rank);
    EXPECT_EQ(own["distributedInfo"]["rank"], rank);
    EXPECT_EQ(own["distributedInfo"]["world_size"], kTracedRanks);
  }
  if (!test::perfetto_is_here())
    GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const json trace = test::perfetto_trace_of(folder_.string());
  ASSERT_TRUE(trace.is_object());
  ASSERT_EQ(trace["processes"].size(), static_cast<std::size_t>(kTracedRanks));
  expect_collectives_at_one_time(trace);
  expect_clocks_agree(trace);
  for (int rank = 0; rank < kTracedRanks; ++rank) {
    EXPECT_EQ(trace["processes"][static_cast<std::size_t>(rank)]["name"], rank_name(rank));
    expect_flows(trace, rank_name(rank));
    std::vector<int> codes;
    for (const json& counter : trace["counters"]) {
      if (counter["process"] == rank_name(rank) && counter["track"] == "code")
        codes.push_back(static_cast<int>(counter["value"].get<double>()));
    }
    EXPECT_EQ(codes, (std::vector<int>{30 + rank, 40 + rank, 50 + rank}));
    EXPECT_EQ(slices_of(trace, rank_name(rank), "step").size(), 3u);
    EXPECT_GE(slices_of(trace, rank_name(rank), "forward").size(), 3u * (kTracedLayers + 1));
  }
}

INSTANTIATE_TEST_SUITE_P(ReplicatedOrSharded, TraceOfRanks, testing::Bool());

}  // namespace
}  // namespace cairn::parallel
