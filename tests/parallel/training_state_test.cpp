// Training states of real ranks: a signal to one of them, a save that only some of them call.
#include "cairn/checkpointing/training_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "cairn/core/error.h"
#include "parallel/ranks.h"

namespace cairn {
namespace {

using checkpointing::TrainingState;
using ::testing::HasSubstr;

struct Counter : core::Stateful {
  std::int64_t value = 0;
  StateDict state_dict() const override {
    StateDict state;
    state.set("value", value);
    return state;
  }
  void load_state_dict(const StateDict& state) override { value = state.integer("value"); }
};

std::string folder_of(const char* name) {
  const auto path = std::filesystem::temp_directory_path() / ("cairn-state-" + std::string(name));
  return path.string() + "-" + std::to_string(getuid());
}

// The signal comes to one rank in its step 5; all end after the same step, and go on from there.
TEST(TrainingStateOfRanks, ASignalToOneSavesOnAllAndEndsAll) {
  const std::string dir = folder_of("signal");
  const auto results = test::start_ranks(3, [&](int rank) {
    parallel::ProcessGroup group = parallel::ProcessGroup::from_environment(test::fast_options());
    Counter counter;
    TrainingState state({{"counter", counter}}, group.world(), {.asynchronous = true});
    state.save_on_signal(SIGTERM, dir);
    state.resume_latest(dir);
    while (state.step() < 1000) {
      ++counter.value;
      if (rank == 1 && state.step() == 4) kill(getpid(), SIGTERM);
      state.save_every(3, dir);
    }
    FAIL() << "rank " << rank << " heard of no signal";
  });
  if (results.empty()) return;
  for (const test::RankResult& result : results) {
    EXPECT_EQ(result.status, checkpointing::kSavedOnSignal) << result.output;
    EXPECT_THAT(result.output, ::testing::Not(HasSubstr("error"))) << result.output;
  }
  Counter counter;
  TrainingState state({{"counter", counter}}, {}, {.read_only = true});
  const auto found = state.resume_latest(dir);
  std::filesystem::remove_all(dir);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step, 5);
  EXPECT_EQ(counter.value, 5);
  EXPECT_EQ(found->world_size, 3);
}

// "if (rank == 0) state.save(...)": the others go on to their next collective.
TEST(TrainingStateOfRanks, ASaveThatOnlySomeCallEndsInAnErrorOnAll) {
  const std::string dir = folder_of("some");
  const auto results = test::start_ranks(2, [&](int rank) {
    parallel::ProcessGroup group = parallel::ProcessGroup::from_environment(test::fast_options());
    Counter counter;
    TrainingState state({{"counter", counter}}, group.world());
    try {
      if (rank == 0) state.save(dir, 5);
      if (rank == 1) group.all_reduce(Tensor::zeros({4}), parallel::ReduceOp::sum, "gradients");
      ADD_FAILURE() << "expected an error on rank " << rank;
    } catch (const core::CommunicationError& e) {
      EXPECT_THAT(e.what(), HasSubstr("save of step 5"));
    }
  });
  std::filesystem::remove_all(dir);
  for (const test::RankResult& result : results) {
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_LT(result.seconds, 10);
  }
}

}  // namespace
}  // namespace cairn
