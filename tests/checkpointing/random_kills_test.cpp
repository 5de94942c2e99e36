// Real processes that save to a real file system, killed at random moments: every state that is
// left can be read, and resuming finds the newest one that had been complete. CAIRN_KILLED_SAVES
// says how many; scripts/stateful saves N.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/log.h"
#include "cairn/core/parallel_for.h"
#include "checkpointing/temporary_folder.h"

namespace cairn::checkpointing {
namespace {

struct KilledWeights : core::Stateful {
  Tensor weight = Tensor::zeros({1 << 14}), padding = Tensor::zeros({0});
  void set(std::int64_t value) {
    weight = Tensor::full(weight.shape(), static_cast<double>(value));
    padding = Tensor::full({value * 7919 % 5 * 4096}, static_cast<double>(-value));
  }
  bool is(std::int64_t value) const {
    KilledWeights expected;
    expected.set(value);
    return weight.to_vector() == expected.weight.to_vector() &&
           padding.to_vector() == (value == 0 ? Tensor::zeros({0}) : expected.padding).to_vector();
  }
  StateDict state_dict() const override {
    StateDict state;
    state.set("weight", weight);
    state.set("padding", padding);
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    core::copy_bytes(state.tensor("weight"), weight);
    padding = Tensor::empty_like(state.tensor("padding"));
    core::copy_bytes(state.tensor("padding"), padding);
  }
};

// What a writer and those who watch it share.
struct Progress {
  std::atomic<std::int64_t> begun{0}, complete{0}, saved{0}, full{0};
  std::atomic<unsigned> microseconds{20000};  // of the last save
  std::atomic<bool> error{false};             // that no save had
};

// Saves without pause, in the background or not, until it is killed.
[[noreturn]] void save_for_ever(const std::string& dir, bool asynchronous, Progress& progress) {
  KilledWeights weights;
  TrainingState state({{"weights", weights}}, {}, {.keep = 2});
  state.resume_latest(dir);
  for (std::int64_t step = state.step() + 1;; ++step) {
    weights.set(step);
    progress.begun = step;
    const auto start = std::chrono::steady_clock::now();
    try {
      if (asynchronous) {
        state.save_async(dir, step);
        weights.set(0);  // the copy is what counts
        state.finish();
      } else {
        state.save(dir, step);
      }
      progress.complete = step;
      ++progress.saved;
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - start;
      progress.microseconds = static_cast<unsigned>(took.count());
    } catch (const core::IoError&) {  // full
      ++progress.full;
    }
  }
}

struct Found {
  int kills = 0, unreadable = 0, older = 0, wrong = 0, saved = 0, full = 0, errors = 0;
};

std::ostream& operator<<(std::ostream& out, const Found& found) {
  return out << found.kills << " kills, " << found.saved << " saves: " << found.unreadable
             << " unreadable states, " << found.older << " resumed from an older one, "
             << found.wrong << " with wrong contents; " << found.full
             << " saves found the disk full";
}

Found kill_saves(const std::string& dir, int kills, bool asynchronous, unsigned seed) {
  void* shared =
      mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& progress = *new (shared) Progress;
  std::mt19937 random(seed);
  Found found;
  for (; found.kills < kills; ++found.kills) {
    const std::int64_t before = progress.complete, saved = progress.saved;
    progress.begun = 0;
    const pid_t child = fork();
    if (child == 0) {
      try {
        save_for_ever(dir, asynchronous, progress);
      } catch (const std::exception& e) {
        progress.error = true;
        std::cout << e.what() << std::endl;
      }
      _exit(1);
    }
    const auto start = std::chrono::steady_clock::now();
    const auto waited = [&] { return std::chrono::steady_clock::now() - start; };
    while (progress.begun == 0 && !progress.error && waited() < std::chrono::seconds(20))
      usleep(100);
    usleep(random() % (3 * progress.microseconds + 1));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    if (progress.saved == saved) {  // on a slow disk
      progress.microseconds = std::min(2 * progress.microseconds, 300000U);
    }
    for (const std::string& path : list_checkpoints(dir)) {
      found.unreadable += find_damage(path).empty() ? 0 : 1;
    }
    KilledWeights weights;
    const std::int64_t newest = std::max<std::int64_t>(before, progress.complete);
    try {
      TrainingState state({{"weights", weights}}, {}, {.read_only = true});
      const auto info = state.resume_latest(dir);
      found.older += (info ? info->step : 0) < newest ? 1 : 0;
      found.wrong += weights.is(info ? info->step : 0) ? 0 : 1;
    } catch (const core::Error& e) {
      std::cout << e.what() << std::endl;
      ++found.unreadable;
    }
  }
  found.saved = static_cast<int>(progress.saved);
  found.full = static_cast<int>(progress.full);
  found.errors = progress.error ? 1 : 0;
  munmap(shared, sizeof(Progress));
  return found;
}

int kills_to_try() {
  const char* number = std::getenv("CAIRN_KILLED_SAVES");
  return number == nullptr ? 10 : std::atoi(number);
}

void expect_none_lost(const Found& found) {
  std::cout << found << std::endl;
  EXPECT_EQ(found.unreadable, 0);
  EXPECT_EQ(found.older, 0);
  EXPECT_EQ(found.wrong, 0);
  EXPECT_EQ(found.errors, 0);
  EXPECT_GT(found.saved, found.kills / 8);
}

class RandomKills : public ::testing::TestWithParam<bool> {
 protected:
  RandomKills() { core::set_num_threads(1); }
  ~RandomKills() override { core::set_num_threads(threads_); }
  const int threads_ = core::num_threads();
};

TEST_P(RandomKills, LoseNothing) {
  const TemporaryFolder dir;
  log::set_level(log::Level::off);
  expect_none_lost(kill_saves(dir.string(), kills_to_try(), GetParam(), 1));
  log::set_level(log::Level::info);
}

// A file system on which three states, of 64 to 128 KiB and headers, fit unless they are the
// largest. It is mounted in a namespace of the child's own.
TEST_P(RandomKills, OnAFullDiskLoseNothing) {
  const TemporaryFolder dir;
  int results[2];
  ASSERT_EQ(pipe(results), 0);
  const pid_t child = fork();
  if (child == 0) {
    log::set_level(log::Level::off);
    const bool mounted = (unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
                         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                         mount("none", dir.string().c_str(), "tmpfs", 0, "size=370k") == 0;
    if (!mounted) _exit(2);
    const Found found = kill_saves(dir.string(), kills_to_try(), GetParam(), 2);
    const auto written = write(results[1], &found, sizeof found);
    _exit(written == sizeof found ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 2)
    GTEST_SKIP() << "no file system of its own here";
  Found found;
  ASSERT_EQ(read(results[0], &found, sizeof found), static_cast<ssize_t>(sizeof found));
  expect_none_lost(found);
  EXPECT_GT(found.full, 0);
  close(results[0]);
  close(results[1]);
}

INSTANTIATE_TEST_SUITE_P(All, RandomKills, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "asynchronous" : "synchronous");
});

}  // namespace
}  // namespace cairn::checkpointing
