// A signal that asks a training to save and end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/log.h"
#include "cairn/core/parallel_for.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "io/system_calls.h"

namespace cairn::checkpointing {
namespace {

// A process that trains until it is told to end. Returns its exit status.
int train_until(int signal_number, const std::string& dir, bool asynchronous) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    core::set_num_threads(1);
    log::set_level(log::Level::off);
    SmallState small;
    TrainingState state({{"small", small}}, {}, {.asynchronous = asynchronous});
    state.save_on_signal(signal_number, dir);
    state.resume_latest(dir);
    for (int i = 0; i < 100000; ++i) {
      small.change(static_cast<float>(state.step() + 1));
      state.save_every(7, dir);
      if (i == 20) [[maybe_unused]]
        const auto told = write(ready[1], "+", 1);
      usleep(200);
    }
    _exit(1);
  }
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  kill(child, signal_number);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(SaveOnSignal, EndsWithAStatusOfItsOwnAndTheNextRunGoesOn) {
  const TemporaryFolder dir;
  std::int64_t last = 0;
  for (const int signal_number : {SIGTERM, SIGUSR1}) {
    for (const bool asynchronous : {false, true}) {
      EXPECT_EQ(train_until(signal_number, dir.string(), asynchronous), kSavedOnSignal);
      SmallState small, expected;
      const auto found = TrainingState({{"small", small}}).resume_latest(dir.string());
      ASSERT_TRUE(found);
      EXPECT_GT(found->step, last + 20);  // the very step, not one of every seventh
      last = found->step;
      expected.change(static_cast<float>(last));
      EXPECT_TRUE(small == expected) << last;
    }
  }
}

// A disk that takes its time.
struct SlowDisk : SystemCalls {
  ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    usleep(50000);
    return SystemCalls::write(file, data, bytes, offset);
  }
};

// The step stands in another folder; or in this one, but is still written by a thread.
TEST(SaveOnSignal, EndsWhenTheStepIsWholeInItsOwnFolder) {
  for (const char* folder : {"other", "asked"}) {
    const TemporaryFolder dir;
    const pid_t child = fork();
    if (child == 0) {
      core::set_num_threads(1);
      log::set_level(log::Level::off);
      SlowDisk disk;
      const SystemCallsGuard guard(disk);
      SmallState small;
      TrainingState state({{"small", small}}, {}, {.asynchronous = true});
      state.save_on_signal(SIGUSR1, dir / "asked");
      raise(SIGUSR1);
      state.save_every(1, dir / folder);
      _exit(1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), kSavedOnSignal);
    EXPECT_EQ(list_checkpoints(dir / "asked").size(), 1u) << folder;
  }
}

// A cluster's warning, and its SIGTERM while the state that was asked for is written.
TEST(SaveOnSignal, IsNotCutShortBySigterm) {
  struct TerminatingDisk : SystemCalls {
    ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
      raise(SIGTERM);
      return SystemCalls::write(file, data, bytes, offset);
    }
  };
  const TemporaryFolder dir;
  const pid_t child = fork();
  if (child == 0) {
    core::set_num_threads(1);
    log::set_level(log::Level::off);
    TerminatingDisk disk;
    const SystemCallsGuard guard(disk);
    SmallState small;
    TrainingState state({{"small", small}});
    state.save_on_signal(SIGUSR1, dir.string());
    raise(SIGUSR1);
    state.end_on_signal(1);
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), kSavedOnSignal);
  EXPECT_EQ(list_checkpoints(dir.string()).size(), 1u);
}

TEST(SaveOnSignal, GivesTheSignalBack) {
  const TemporaryFolder dir;
  SmallState small;
  struct sigaction before {
  }, after{};
  sigaction(SIGUSR1, nullptr, &before);
  {
    TrainingState state({{"small", small}});
    state.save_on_signal(SIGUSR1, dir.string());
    state.save_on_signal(SIGUSR1, dir.string());
    state.save_every(1, dir.string());
  }
  sigaction(SIGUSR1, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST(SaveOnSignal, RefusesWhatCannotBeHandled) {
  SmallState small;
  TrainingState state({{"small", small}});
  EXPECT_THROW(state.save_on_signal(SIGKILL, "runs"), core::InvalidArgument);
  EXPECT_THROW(state.save_on_signal(0, "runs"), core::InvalidArgument);
  EXPECT_THROW(state.save_on_signal(SIGTERM, ""), core::InvalidArgument);
  state.end_on_signal(5);  // nobody asked
}

}  // namespace
}  // namespace cairn::checkpointing
