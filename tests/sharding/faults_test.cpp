// Sharded jobs whose ranks are killed, stopped or slow at any moment of a step: the others say so
// in time, and the job goes on from its last checkpoint with the bits of one that nobody disturbed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/step.h"

namespace cairn {
namespace {

using std::chrono::microseconds;
using test::Training;

constexpr int kJobRanks = 3, kVictim = 1, kSavedAt = 3, kLastStep = 6;

const test::Recipe kClippedLamb{
    .name = "lamb",
    .optimizer = test::make<optim::FusedLAMB>(optim::LambOptions{.lr = 0.01}),
    .max_norm = 0.05};

struct Strike {
  parallel::ZeroStage stage;
  int signal;
  std::string name() const {
    return core::str("stage_", static_cast<int>(stage), signal == SIGKILL ? "_killed" : "_stopped");
  }
  /// The same in the processes of the ranks as in that which starts them.
  std::string folder() const {
    const bool is_rank = std::getenv("CAIRN_TEST_RANK") != nullptr;
    return core::str(::testing::TempDir(), "cairn-sharded-faults-", name(), '-',
                     is_rank ? getppid() : getpid());
  }
};

parallel::ProcessGroup join() {
  return parallel::ProcessGroup::from_environment(test::fast_options());
}

/// At some moment of the next steps, another one in each run. Who is stopped is killed in the end.
void strike_soon(int signal) {
  const std::string end = core::str("sleep 9; kill -9 ", getpid());
  char shell[] = "sh", option[] = "-c";
  char* const arguments[] = {shell, option, const_cast<char*>(end.c_str()), nullptr};
  pid_t helper = 0;
  if (signal == SIGSTOP) posix_spawnp(&helper, shell, nullptr, nullptr, arguments, environ);
  std::thread([signal, wait = microseconds(std::random_device()() % 20000)] {
    std::this_thread::sleep_for(wait);
    kill(getpid(), signal);
  }).detach();
}

/// Trains until the victim is struck; the others end with an error that names it.
void train_until_struck(const Strike& c, int rank) {
  Training training(kClippedLamb, join(), c.stage);
  for (int step = 1; step <= kSavedAt; ++step) test::expect_applied(training.step());
  training.state->save(c.folder(), kSavedAt);
  if (rank == kVictim) strike_soon(c.signal);
  std::string said;
  try {
    for (int step = 0; step < 100000; ++step) (void)training.step();
  } catch (const core::CommunicationError& error) {
    said = error.what();
  }
  EXPECT_THAT(said, testing::HasSubstr("rank 1 died")) << "on rank " << rank;
}

void expect_goes_on(const Strike& c, const parallel::ProcessGroup& group) {
  Training resumed(kClippedLamb, group, c.stage), undisturbed(kClippedLamb, group, test::kPlain);
  for (int step = 1; step <= kSavedAt; ++step) test::expect_applied(undisturbed.step());
  EXPECT_TRUE(resumed.state->resume_latest(c.folder()));
  resumed.go_on_after(kSavedAt);
  for (int step = kSavedAt + 1; step <= kLastStep; ++step) {
    test::expect_applied(resumed.step());
    test::expect_applied(undisturbed.step());
    ASSERT_EQ(test::difference_of_weights(resumed, undisturbed), "") << step;
  }
}

class ShardedFaults : public testing::TestWithParam<Strike> {};

TEST_P(ShardedFaults, AreNamedAndTheJobGoesOnFromItsCheckpoint) {
  const Strike& c = GetParam();
  const auto results = test::start_ranks(
      kJobRanks, [&](int rank) { train_until_struck(c, rank); }, 60.0);
  if (results.empty()) return;
  for (int rank = 0; rank < kJobRanks; ++rank) {
    const test::RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_EQ(result.status, rank == kVictim ? 128 + SIGKILL : 0) << result.output;
    EXPECT_LT(result.seconds, 30.0);
  }
  test::run_threads(kJobRanks, [&](parallel::ProcessGroup& group) { expect_goes_on(c, group); });
  std::filesystem::remove_all(c.folder());
}

INSTANTIATE_TEST_SUITE_P(, ShardedFaults,
                         testing::Values(Strike{parallel::ZeroStage::optimizer_states, SIGKILL},
                                         Strike{parallel::ZeroStage::gradients, SIGKILL},
                                         Strike{parallel::ZeroStage::parameters, SIGKILL},
                                         Strike{parallel::ZeroStage::parameters, SIGSTOP}),
                         [](const auto& info) { return info.param.name(); });

// Ranks come to every collective at other times.
TEST(SlowRanks, ChangeNoBit) {
  test::run_threads(kJobRanks, [](parallel::ProcessGroup& group) {
    for (const test::Stage stage : {test::kStates, test::kGradients, test::kParameters}) {
      Training sharded(kClippedLamb, group, stage), plain(kClippedLamb, group, test::kPlain);
      std::vector<autograd::HookHandle> hooks;
      std::minstd_rand random(static_cast<unsigned>(group.rank()));
      for (const auto& [name, tensor] : sharded.net.parameters()) {
        hooks.push_back(autograd::on_gradient_ready(tensor, [&random](const Tensor&) {
          std::this_thread::sleep_for(microseconds(random() % 4000));
        }));
      }
      for (int step = 0; step < 4; ++step) {
        std::this_thread::sleep_for(microseconds(random() % 4000));
        const optim::StepResult got = sharded.step(), expected = plain.step();
        ASSERT_EQ(got.gradient_norm, expected.gradient_norm);
      }
      EXPECT_EQ(test::difference_of_weights(sharded, plain), "");
    }
  });
}

}  // namespace
}  // namespace cairn
