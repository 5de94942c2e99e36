// What is legal and mostly a mistake is said once, by rank 0.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdlib.h>

#include <filesystem>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/parallel/distributed.h"
#include "ranks.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

/// How often each rank says it in three steps with these batches.
std::vector<int> count(const std::string& text, Tensor (*batch)(int rank, int step)) {
  const auto results = test::start_ranks(3, [&](int rank) {
    auto group = ProcessGroup::from_environment(test::fast_options());
    nn::Linear model(4, 2);
    DistributedDataParallel ddp(model, group);
    for (int step = 0; step < 3; ++step) autograd::backward(autograd::sum(ddp(batch(rank, step))));
  });
  std::vector<int> counts;
  for (const auto& result : results) {
    EXPECT_EQ(result.status, 0) << result.output;
    counts.push_back(0);
    for (auto at = result.output.find(text); at != std::string::npos;
         at = result.output.find(text, at + 1))
      ++counts.back();
  }
  return counts;
}

Tensor drawn(int seed) {
  return test::normal_tensor({5, 4}, static_cast<std::uint64_t>(seed));
}

constexpr const char* kSame = "all 3 ranks were given the same first batch";

TEST(LikelyMistakes, TheSameBatchOnEveryRank) {
  const auto counts = count(kSame, [](int, int step) { return drawn(step); });
  const std::vector<int> expected{1, 0, 0};
  EXPECT_TRUE(counts.empty() || counts == expected) << testing::PrintToString(counts);
}

TEST(LikelyMistakes, BatchesThatMeetLaterOrOnSomeRanksAreNone) {
  const auto counts =
      count(kSame, [](int rank, int step) { return drawn(step == 0 ? rank / 2 : step); });
  const std::vector<int> expected{0, 0, 0};
  EXPECT_TRUE(counts.empty() || counts == expected) << testing::PrintToString(counts);
}

const bool kGpusForMistakes = setenv("CAIRN_SIM_GPUS", "2", 0) == 0;  // before the first call

/// What two ranks say whose models are on these devices when DDP is made.
void expect_said_of_devices(Device (*place)(const ProcessGroup& group),
                            const std::vector<std::string>& expected) {
  const auto results = test::start_ranks(2, [&](int) {
    auto group = ProcessGroup::from_environment(test::fast_options());
    nn::Linear model(4, 2);
    model.to(place(group));
    DistributedDataParallel ddp(model, group);
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, 0) << results[rank].output;
    const std::string text = "the model may be on a wrong device: ";
    const auto at = results[rank].output.find(text);
    const std::string said =
        at == std::string::npos ? "" : results[rank].output.substr(at + text.size());
    EXPECT_THAT(said, testing::StartsWith(expected[rank]));
    EXPECT_EQ(said.empty(), expected[rank].empty()) << said;
    EXPECT_EQ(said.find(text), std::string::npos) << "said twice";
  }
}

TEST(NcclLikelyMistakes, AModelOnTheCpuBesideGpus) {
  if (core::device_count(core::DeviceType::cuda) < 2) GTEST_SKIP() << "needs two GPUs";
  expect_said_of_devices(
      [](const ProcessGroup&) { return Device{}; },
      {"rank 0's on cpu:0 instead of cuda:0, rank 1's on cpu:0 instead of cuda:1 "
       "(model.to(group.device()))",
       ""});
}

TEST(NcclLikelyMistakes, ModelsOnTheirRanksGpusAreNone) {
  if (core::device_count(core::DeviceType::cuda) < 2) GTEST_SKIP() << "needs two GPUs";
  expect_said_of_devices([](const ProcessGroup& group) { return group.device(""); }, {"", ""});
}

TEST(LikelyMistakes, AnyCpuDeviceIsRightWithoutGpus) {
  if (core::device_count(core::DeviceType::cuda) > 0)
    GTEST_SKIP() << "needs a machine without GPUs";
  expect_said_of_devices([](const ProcessGroup&) { return Device{}; }, {"", ""});
}

/// What all ranks say when so many resume what one has saved.
std::string said_on_resume(int size) {
  const std::string folder = testing::TempDir() + "cairn_likely_mistakes";
  std::filesystem::remove_all(folder);
  nn::Linear saved(4, 2);
  checkpointing::TrainingState({{"model", saved}}, World()).save(folder, 7);
  testing::internal::CaptureStderr();
  test::run_threads(size, [&](ProcessGroup& group) {
    nn::Linear model(4, 2);
    checkpointing::TrainingState({{"model", model}}, group.world()).resume_latest(folder);
  });
  std::filesystem::remove_all(folder);
  return testing::internal::GetCapturedStderr();
}

TEST(LikelyMistakes, AWorldOfAnotherSizeHasAnotherGlobalBatch) {
  const std::string text = said_on_resume(2),
                    warning = "was saved by a world of 1 and goes on in one of 2";
  EXPECT_THAT(text, testing::HasSubstr(warning));
  EXPECT_EQ(text.find(warning), text.rfind(warning));
  EXPECT_EQ(said_on_resume(1), "");
}

}  // namespace
}  // namespace cairn::parallel
