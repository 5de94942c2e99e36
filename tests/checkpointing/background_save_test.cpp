// Saves that a thread finishes while the training goes on.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/optim/adam.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "checkpointing/threads_world.h"
#include "io/system_calls.h"
#include "optim/support.h"
#include "support/step.h"

namespace cairn::checkpointing {
namespace {

namespace fs = std::filesystem;
using core::CommunicationError;
using core::IoError;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The real disk, whose writes of tensors wait at a gate or fail.
class Gate : public SystemCalls {
 public:
  void close_gate() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  void open_gate() {
    const std::lock_guard lock(mutex_);
    closed_ = false;
    changed_.notify_all();
  }
  std::atomic<int> fails_with{0};  // errno
  std::atomic<int> waiting{0};
  std::size_t least_bytes = 0;  // of a write that waits

  ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    if (bytes >= least_bytes) {
      std::unique_lock lock(mutex_);
      if (closed_) ++waiting;
      changed_.wait(lock, [&] { return !closed_; });
    }
    if (fails_with == 0) return SystemCalls::write(file, data, bytes, offset);
    errno = fails_with;
    return -1;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
};

class BackgroundSave : public ::testing::Test {
 protected:
  Gate gate_;
  SystemCallsGuard guard_{gate_};
  TemporaryFolder dir_;
};

TEST_F(BackgroundSave, WritesTheBytesOfASynchronousOne) {
  SmallState small;
  small.change(3);
  TrainingState now({{"small", small}}), later({{"small", small}});
  for (int step = 1; step <= 2; ++step) {
    manual_seed(5);
    now.save(dir_ / "now", step, 0.5);
    later.save_async(dir_ / "later", step, 0.5);
    later.finish();
    for (const char* file : {"manifest.json", "rank-0.safetensors", "state.safetensors"}) {
      const std::string name = core::str("/step-0000000", step, "/", file);
      EXPECT_EQ(read_bytes(dir_ / "now" + name), read_bytes(dir_ / "later" + name)) << name;
    }
  }
}

TEST_F(BackgroundSave, HoldsWhatTheStateWasAtTheCall) {
  SmallState small, fresh;
  small.change(3);
  const std::int64_t steps = small.steps;
  TrainingState state({{"small", small}});
  manual_seed(42);
  state.save_every(1, dir_.string());  // opens the folder
  gate_.close_gate();
  // The lock and the folders are this call's; only what the thread writes waits.
  std::thread opens([&] {
    while (gate_.waiting == 0) std::this_thread::yield();
    gate_.open_gate();
  });
  state.save_async(dir_.string(), 2);
  core::copy_bytes(Tensor::full({2, 3}, 99), small.weight);
  small.steps = 0;
  manual_seed(1);
  opens.join();
  state.finish();
  TrainingState({{"small", fresh}}).resume(dir_ / "step-00000002");
  EXPECT_EQ(fresh.weight.to_vector(), std::vector<double>(6, 3));
  EXPECT_EQ(fresh.steps, steps);
  EXPECT_EQ(Generator::current().seed(), 42u);
}

TEST_F(BackgroundSave, OneIsInFlightAndItsMemoryIsAccounted) {
  // A GPU's snapshot lies in page-locked memory, which is counted beside that of cpu:0.
  const bool on_cpu = core::default_device().is_cpu();
  struct Large : SmallState {
    Large() { weight = Tensor::zeros({1024, 256}); }
  } large;
  const std::uint64_t bytes = large.weight.nbytes();
  TrainingState state({{"large", large}});
  state.save(dir_.string(), 1);
  const std::size_t idle = core::memory_stats({}).current_total;
  gate_.close_gate();
  state.save_async(dir_.string(), 2);
  EXPECT_GE(core::memory_stats({}).current_total, idle + (on_cpu ? bytes : 0));
  std::thread opens([&] {
    while (gate_.waiting == 0) std::this_thread::yield();
    EXPECT_TRUE(list_checkpoints(dir_.string()).size() == 1);
    gate_.open_gate();
  });
  state.save_async(dir_.string(), 3);  // waits for the one before
  opens.join();
  ASSERT_TRUE(state.last_save());
  EXPECT_EQ(state.last_save()->step, 2);
  EXPECT_GE(state.last_save()->snapshot_bytes, bytes);
  EXPECT_GE(state.last_save()->bytes, bytes);
  EXPECT_GT(state.last_save()->seconds, state.last_save()->blocked_seconds);
  state.finish();
  EXPECT_EQ(core::memory_stats({}).current_total, idle);
  EXPECT_EQ(list_checkpoints(dir_.string()).size(), 3u);
}

// Pieces are copied by several threads: tensors of more than one, of halves, and of one byte more.
TEST_F(BackgroundSave, HoldsEveryByteOfLargeTensorsAndOfHalves) {
  const auto tensors_of = [](double value) {
    NamedTensors tensors;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::u8}) {
      tensors.push_back(
          {std::string(core::name(dtype)), Tensor::full({(5 << 20) + 1}, value, dtype, Device{})});
    }
    return tensors;
  };
  const NamedTensors saved = tensors_of(3), loaded = tensors_of(0), expected = tensors_of(3);
  Tensors part(saved), own(loaded);
  TrainingState state({{"part", part}});
  gate_.least_bytes = 1 << 20;  // of the tensors
  gate_.close_gate();
  state.save_async(dir_.string(), 2);
  for (const auto& [name, tensor] : saved) {
    core::copy_bytes(Tensor::full(tensor.shape(), 9, tensor.dtype(), Device{}), tensor);
  }
  gate_.open_gate();
  state.finish();
  TrainingState({{"part", own}}).resume(dir_ / "step-00000002");
  for (std::size_t i = 0; i < loaded.size(); ++i) {
    EXPECT_EQ(std::memcmp(loaded[i].tensor.raw_data(), expected[i].tensor.raw_data(),
                          expected[i].tensor.nbytes()),
              0)
        << loaded[i].name;
  }
}

// bf16 weights whose masters are remainders, and bf16 moments, which the training changes
// meanwhile: the bytes of a save that was done before it went on.
TEST_F(BackgroundSave, HoldsCompactStatesWhileTheTrainingGoesOn) {
  const auto half = [](double value) {
    Tensor x = Tensor::full({1 << 20}, value, DType::bf16, Device{});
    x.set_requires_grad(true);
    return x;
  };
  const NamedTensors weights = {{"a", half(0.3)}, {"b", half(-2)}};
  Tensors model(weights);
  optim::FusedAdam adam(weights, {.lr = 1e-3});
  adam.set_state_options({.moments = DType::bf16, .masters = optim::MasterStorage::remainder});
  const auto train = [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      for (const auto& [name, x] : weights)
        optim::write_gradient(x,
                              std::vector<double>(static_cast<std::size_t>(x.numel()), 0.1 + step));
      test::expect_applied(adam.step());
    }
  };
  train(3);
  TrainingState now({{"model", model}, {"adam", adam}}), later({{"model", model}, {"adam", adam}});
  now.save(dir_ / "now", 1);
  gate_.least_bytes = 1 << 20;
  gate_.close_gate();
  later.save_async(dir_ / "later", 1);
  train(2);
  gate_.open_gate();
  later.finish();
  EXPECT_GT(later.last_save()->snapshot_bytes, 0u);
  const std::string file = "/step-00000001/state.safetensors";
  EXPECT_TRUE(read_bytes(dir_ / "now" + file) == read_bytes(dir_ / "later" + file));
  now.save(dir_ / "after", 1);
  EXPECT_FALSE(read_bytes(dir_ / "after" + file) == read_bytes(dir_ / "later" + file));
}

// The copy goes when all is written, not when somebody asks.
TEST_F(BackgroundSave, GivesItsMemoryBackByItself) {
  struct Large : SmallState {
    Large() { weight = Tensor::zeros({1024, 256}); }
  } large;
  TrainingState state({{"large", large}});
  const std::size_t idle = core::memory_stats({}).current_total;
  state.save_async(dir_.string(), 2);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (core::memory_stats({}).current_total > idle) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  state.finish();
}

TEST_F(BackgroundSave, ShardsCountForTheLimitToo) {
  const Tensor rows = Tensor::zeros({1024, 4});
  SmallState small;
  Shards shards({{"rows", {rows, {1024, 4}, 0}}});
  TrainingState state({{"small", small}, {"shards", shards}}, {},
                      {.snapshot_bytes = rows.nbytes()});
  state.save_async(dir_.string(), 1);
  state.finish();
  EXPECT_EQ(state.last_save()->snapshot_bytes, 0u);
}

TEST_F(BackgroundSave, WhatPassesTheLimitIsWrittenBeforeTheCallReturns) {
  SmallState small, fresh;
  small.change(4);
  TrainingState state({{"small", small}}, {}, {.snapshot_bytes = 8});
  state.save_async(dir_.string(), 1);
  small.change(5);
  state.finish();
  EXPECT_EQ(state.last_save()->snapshot_bytes, 0u);
  TrainingState({{"small", fresh}}).resume_latest(dir_.string());
  EXPECT_EQ(fresh.weight.to_vector()[0], 4);
}

TEST_F(BackgroundSave, AnErrorComesAtTheNextCall) {
  SmallState small;
  TrainingState state({{"small", small}});
  state.save(dir_.string(), 1);
  state.save_async(dir_.string(), 2);
  state.finish();
  const std::string before = read_bytes(dir_ / "step-00000002/manifest.json");
  gate_.fails_with = ENOSPC;
  state.save_async(dir_.string(), 2);
  EXPECT_THAT(message_of<IoError>([&] { state.save_async(dir_.string(), 3); }),
              AllOf(HasSubstr("state.safetensors"), HasSubstr("No space left on device")));
  gate_.fails_with = 0;
  EXPECT_EQ(read_bytes(dir_ / "step-00000002/manifest.json"), before);
  EXPECT_FALSE(fs::exists(dir_ / ".step-00000002.tmp"));
  state.save_async(dir_.string(), 3);
  state.finish();
  EXPECT_EQ(list_checkpoints(dir_.string()).size(), 3u);
}

TEST_F(BackgroundSave, AnErrorAtTheEndIsLogged) {
  SmallState small;
  ::testing::internal::CaptureStderr();
  {
    TrainingState state({{"small", small}});
    state.save(dir_.string(), 1);
    gate_.fails_with = EIO;
    state.save_async(dir_.string(), 2);
  }
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      AllOf(HasSubstr("save of step 2 in the background failed"), HasSubstr("Input/output error")));
}

TEST_F(BackgroundSave, TheEndWaitsForIt) {
  SmallState small;
  { TrainingState({{"small", small}}).save_async(dir_.string(), 7); }
  EXPECT_THAT(find_damage(dir_ / "step-00000007"), IsEmpty());
}

/// How many files of the folder are locked.
int locked_in(const TemporaryFolder& folder) {
  int locked = 0;
  for (const auto& entry : fs::directory_iterator(folder.string())) {
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    locked += flock(file, LOCK_SH | LOCK_NB) != 0 ? 1 : 0;
    close(file);
  }
  return locked;
}

/// Looks, while it is saved, at the folder of cairn-run's.
struct Looks : core::Stateful {
  explicit Looks(const TemporaryFolder& marks) : folder(&marks) {}
  StateDict state_dict() const override {
    locked.push_back(locked_in(*folder));
    return {};
  }
  void load_state_dict(const StateDict& /*state*/) override {}
  const TemporaryFolder* folder;
  mutable std::vector<int> locked;
};

// cairn-run kills nobody meanwhile.
TEST_F(BackgroundSave, TheLauncherIsToldUntilItIsWhole) {
  const TemporaryFolder marks;
  setenv("CAIRN_SAVING_FOLDER", marks.string().c_str(), 1);
  SmallState small;
  Looks looks(marks);
  TrainingState state({{"small", small}, {"looks", looks}});
  state.save(dir_.string(), 1);
  EXPECT_THAT(looks.locked, ::testing::Each(1));
  EXPECT_TRUE(fs::is_empty(marks.string()));
  gate_.close_gate();
  state.save_async(dir_.string(), 2);
  while (gate_.waiting == 0) std::this_thread::yield();
  EXPECT_EQ(locked_in(marks), 1);
  gate_.open_gate();
  for (int i = 0; i < 1000 && !fs::is_empty(marks.string()); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(fs::is_empty(marks.string()));
  state.finish();
  unsetenv("CAIRN_SAVING_FOLDER");
}

TEST_F(BackgroundSave, SaveEveryWritesSoWhereAsked) {
  SmallState small;
  TrainingState state({{"small", small}}, {}, {.keep = 2, .asynchronous = true});
  for (int i = 0; i < 10; ++i) state.save_every(3, dir_.string());
  state.finish();
  EXPECT_EQ(state.last_save()->step, 9);
  EXPECT_GT(state.last_save()->snapshot_bytes, 0u);
  EXPECT_EQ(list_checkpoints(dir_.string()).size(), 2u);
}

// ---- several ranks

template <class F>
void on_all_ranks(int size, F&& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&f, rank] { f(rank); });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(BackgroundSave, OfSeveralRanksIsOneCheckpoint) {
  ThreadsWorld world(3);
  for (const bool copies : {true, false}) {
    const std::string dir = dir_ / (copies ? "copied" : "written");
    on_all_ranks(3, [&](int rank) {
      SmallState small;
      TrainingState state({{"small", small}}, world.of(rank),
                          {.keep = 2, .snapshot_bytes = copies ? SIZE_MAX : 0});
      for (int step = 1; step <= 4; ++step) {
        small.change(static_cast<float>(step));
        manual_seed(static_cast<std::uint64_t>(10 * step + rank));
        state.save_async(dir, step);
      }
      state.finish();
      EXPECT_EQ(state.last_save()->step, 4);
      EXPECT_GT(state.last_save()->bytes, 0u);
    });
    EXPECT_EQ(list_checkpoints(dir).size(), 2u);
    EXPECT_FALSE(fs::exists(dir + "/step-00000004/rank-1.note"));
    on_all_ranks(3, [&](int rank) {
      SmallState small;
      EXPECT_EQ(TrainingState({{"small", small}}, world.of(rank)).resume_latest(dir)->step, 4);
      EXPECT_EQ(small.weight.to_vector()[0], 4);
      EXPECT_EQ(Generator::current().seed(), 40u + static_cast<unsigned>(rank));
    });
  }
}

// A note has its name only when it is whole: rank 0 may read it at any moment.
TEST_F(BackgroundSave, NotesAreWrittenUnderAnotherName) {
  struct Names : SystemCalls {
    std::atomic<int> notes{0}, in_place{0};
    int open(const std::string& path, int flags) override {
      if ((flags & O_CREAT) != 0 && path.ends_with(".note")) ++in_place;
      return SystemCalls::open(path, flags);
    }
    int rename(const std::string& from, const std::string& to) override {
      if (from != to && to.ends_with(".note")) ++notes;
      return SystemCalls::rename(from, to);
    }
  } names;
  const SystemCallsGuard guard(names);
  ThreadsWorld world(2);
  on_all_ranks(2, [&](int rank) {
    SmallState small;
    TrainingState state({{"small", small}}, world.of(rank));
    state.save_async(dir_.string(), 1);
    message_of<core::Error>([&] { state.finish(); });
  });
  EXPECT_EQ(names.in_place, 0);
  EXPECT_EQ(names.notes, 1);
}

TEST_F(BackgroundSave, AnErrorOnOneRankIsAnErrorOnAll) {
  ThreadsWorld world(2);
  std::vector<std::string> messages(2);
  on_all_ranks(2, [&](int rank) {
    SmallState small;
    TrainingState state({{"small", small}}, world.of(rank));
    state.save(dir_.string(), 1);
    if (rank == 0) gate_.close_gate();
    world.of(rank).barrier("closed");
    state.save_async(dir_.string(), 2);
    if (rank == 1) {
      while (gate_.waiting < 2) std::this_thread::yield();
      fs::remove_all(dir_ / ".step-00000002.tmp");  // nobody's files have a name any more
      gate_.open_gate();
    }
    messages[static_cast<std::size_t>(rank)] = message_of<core::Error>([&] { state.finish(); });
  });
  for (const std::string& message : messages) {
    EXPECT_THAT(message, HasSubstr("No such file or directory"));
  }
  EXPECT_EQ(list_checkpoints(dir_.string()).size(), 1u);
}

TEST_F(BackgroundSave, ARankThatWritesNothingEndsInAnError) {
  ThreadsWorld world(2);
  std::vector<std::string> messages(2);
  on_all_ranks(2, [&](int rank) {
    SmallState small;
    TrainingState state({{"small", small}}, world.of(rank),
                        {.peer_timeout = std::chrono::milliseconds(50)});
    state.save(dir_.string(), 1);
    if (rank == 0) gate_.close_gate();
    world.of(rank).barrier("closed");
    state.save_async(dir_.string(), 2);
    world.of(rank).barrier("begun");
    if (rank == 1) {
      while (gate_.waiting < 2) std::this_thread::yield();
      gate_.fails_with = ENOSPC;  // not even a note that it failed
      gate_.open_gate();
    }
    messages[static_cast<std::size_t>(rank)] = message_of<core::Error>([&] { state.finish(); });
  });
  EXPECT_THAT(messages[1], HasSubstr("No space left on device"));
  EXPECT_NE(messages[0], "nothing thrown");
  EXPECT_EQ(list_checkpoints(dir_.string()).size(), 1u);
}

}  // namespace
}  // namespace cairn::checkpointing
