#include "cairn/checkpointing/training_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <set>
#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/generator.h"
#include "cairn/core/parallel_for.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "checkpointing/threads_world.h"
#include "io/system_calls.h"

namespace cairn::checkpointing {
namespace {

namespace fs = std::filesystem;
using core::DataError;
using core::InvalidArgument;
using core::IoError;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(dir)) names.push_back(item.path().filename());
  std::erase(names, ".lock");
  std::sort(names.begin(), names.end());
  return names;
}

TEST(TrainingState, RoundTripKeepsEveryBit) {
  const TemporaryFolder dir;
  SmallState saved, fresh;
  saved.change(3);
  saved.scale = std::nextafter(0.1, 1);
  saved.steps = std::numeric_limits<std::int64_t>::min();
  manual_seed(0xfedcba9876543210);
  Generator::current().next();
  const std::string path = TrainingState({{"small", saved}}).save(dir.string(), 500);
  EXPECT_EQ(path, dir / "step-00000500");
  EXPECT_THAT(names_in(dir.string()), ElementsAre("step-00000500"));
  EXPECT_THAT(names_in(path),
              ElementsAre("manifest.json", "rank-0.safetensors", "state.safetensors"));

  manual_seed(1);
  TrainingState state({{"small", fresh}});
  const auto info = state.resume_latest(dir.string());
  ASSERT_TRUE(info);
  EXPECT_EQ(info->step, 500);
  EXPECT_EQ(info->path, path);
  EXPECT_EQ(state.step(), 500);
  EXPECT_TRUE(fresh == saved);
  EXPECT_EQ(Generator::current().seed(), 0xfedcba9876543210);
  EXPECT_EQ(Generator::current().offset(), 1u);
}

TEST(TrainingState, NumbersThatAreNotFiniteSurvive) {
  const TemporaryFolder dir;
  SmallState saved, fresh;
  saved.scale = std::numeric_limits<double>::infinity();
  TrainingState({{"small", saved}}).save(dir.string(), 1);
  TrainingState({{"small", fresh}}).resume(dir / "step-00000001");
  EXPECT_EQ(fresh.scale, saved.scale);
}

TEST(TrainingState, NothingThereStartsFresh) {
  const TemporaryFolder dir;
  SmallState small, other;
  TrainingState state{{"small", small}, {"other", other}};
  EXPECT_FALSE(state.resume_latest(dir.string()));
  EXPECT_FALSE(state.resume_latest(dir / "none"));
  EXPECT_EQ(small.loads, 0);
  EXPECT_THAT(message_of<IoError>([&] { state.resume(dir / "step-00000009"); }),
              HasSubstr("step-00000009"));
}

TEST(TrainingState, SaveEveryCountsAndKeepsTheLast) {
  const TemporaryFolder dir;
  SmallState small, other;
  TrainingState state{{{"small", small}, {"other", other}}, {}, {.keep = 2}};
  int saves = 0;
  for (int i = 0; i < 35; ++i) saves += state.save_every(10, dir.string());
  EXPECT_EQ(saves, 3);
  EXPECT_EQ(state.step(), 35);
  EXPECT_THAT(names_in(dir.string()), ElementsAre("step-00000020", "step-00000030"));
}

TEST(TrainingState, StateFileIsPlainSafetensors) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"model", small}}).save(dir.string(), 2);
  const SafetensorsReader file(path + "/state.safetensors");
  EXPECT_THAT(file.read("model.layer.weight").to_vector(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(file.read("model.scale").item(), 0.1);
  EXPECT_EQ(file.read("model.layer.half").dtype(), DType::f16);
}

TEST(TrainingState, SavingAStepAgainReplacesIt) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  state.save(dir.string(), 5);
  small.change(8);
  state.save(dir.string(), 5);
  EXPECT_THAT(names_in(dir.string()), ElementsAre("step-00000005"));
  SmallState fresh;
  TrainingState({{"small", fresh}}).resume_latest(dir.string());
  EXPECT_TRUE(fresh == small);
}

TEST(TrainingState, LeftoversOfAKilledRunAreRemoved) {
  const TemporaryFolder dir;
  fs::create_directories(dir / ".step-00000003.tmp");
  write_bytes(dir / ".step-00000003.tmp/state.safetensors", "half");
  write_bytes(dir / "notes.txt", "mine");
  SmallState small;
  TrainingState({{"small", small}}).save(dir.string(), 4);
  EXPECT_THAT(names_in(dir.string()), ElementsAre("notes.txt", "step-00000004"));
}

// Each way to damage the newest checkpoint makes resume fall back to the one before, and say why.
class Damage : public ::testing::TestWithParam<const char*> {
 protected:
  static void apply(const std::string& how, const std::string& path) {
    const std::string state = path + "/state.safetensors", manifest = path + "/manifest.json";
    if (how == "flipped_bit") {
      std::string bytes = read_bytes(state);
      bytes[bytes.size() - 3] ^= 4;
      write_bytes(state, bytes);
    } else if (how == "truncated") {
      fs::resize_file(state, fs::file_size(state) - 4);
    } else if (how == "missing_file") {
      fs::remove(path + "/rank-0.safetensors");
    } else if (how == "missing_manifest") {
      fs::remove(manifest);
    } else if (how == "edited_manifest") {
      std::string text = read_bytes(manifest);
      text.replace(text.find("\"step\": 20"), 10, "\"step\": 21");
      write_bytes(manifest, text);
    } else if (how == "truncated_manifest") {
      fs::resize_file(manifest, fs::file_size(manifest) / 2);
    } else if (how == "empty_manifest") {
      fs::resize_file(manifest, 0);
    } else if (how == "other_file") {
      fs::copy_file(path + "/rank-0.safetensors", state, fs::copy_options::overwrite_existing);
    }
  }
};

TEST_P(Damage, FallsBackAndIsNamed) {
  const TemporaryFolder dir;
  SmallState small, fresh;
  TrainingState state({{"small", small}}, {}, {.keep = 2});
  state.save(dir.string(), 10);
  small.change(2);
  const std::string newest = state.save(dir.string(), 20);
  EXPECT_THAT(find_damage(newest), IsEmpty());
  apply(GetParam(), newest);
  EXPECT_THAT(find_damage(newest), Not(IsEmpty()));

  ::testing::internal::CaptureStderr();
  TrainingState resumed({{"small", fresh}}, {}, {.keep = 2});
  const auto info = resumed.resume_latest(dir.string());
  const std::string log = ::testing::internal::GetCapturedStderr();
  ASSERT_TRUE(info);
  EXPECT_EQ(info->step, 10);
  EXPECT_TRUE(fresh == SmallState());
  EXPECT_THAT(log, AllOf(HasSubstr("warn"), HasSubstr("step-00000020")));

  // The damaged one does not count as good: the only good one survives the next save.
  resumed.save(dir.string(), 15);
  EXPECT_TRUE(fs::exists(dir / "step-00000010"));
  EXPECT_THROW(resumed.resume(newest), core::Error);
  EXPECT_TRUE(fresh == SmallState());
}
INSTANTIATE_TEST_SUITE_P(All, Damage,
                         ::testing::Values("flipped_bit", "truncated", "missing_file",
                                           "missing_manifest", "edited_manifest",
                                           "truncated_manifest", "empty_manifest", "other_file"),
                         [](const auto& info) { return std::string(info.param); });

TEST(TrainingState, DamageNamesTheEntry) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  const std::string path = state.save(dir.string(), 1);
  std::string bytes = read_bytes(path + "/state.safetensors");
  bytes[bytes.size() - 1] ^= 1;  // of the narrowest element: layer.half
  write_bytes(path + "/state.safetensors", bytes);
  EXPECT_THAT(find_damage(path), ElementsAre(HasSubstr("'small.layer.half' f16 [2] is damaged")));
  EXPECT_THAT(message_of<DataError>([&] { state.resume_latest(dir.string()); }),
              AllOf(HasSubstr("1 damaged"), HasSubstr("small.layer.half")));
  EXPECT_EQ(small.loads, 0);
}

TEST(TrainingState, AnotherTrainingsCheckpointChangesNothing) {
  const TemporaryFolder dir;
  SmallState first, second, third;
  TrainingState({{"a", first}, {"b", second}, {"d", third}}).save(dir.string(), 1);
  SmallState good, other, extra;
  good.change(5);
  other.weight = Tensor::zeros({3, 2});
  const SmallState good_before = good.copy();
  manual_seed(99);
  TrainingState state({{"a", good}, {"b", other}, {"c", extra}});
  const std::string message = message_of<DataError>([&] { state.resume_latest(dir.string()); });
  EXPECT_THAT(message, AllOf(HasSubstr("in 'b': [small] expected layer.weight [3, 2], got [2, 3]"),
                             HasSubstr("missing: 'c'"), HasSubstr("surplus: 'd'")));
  EXPECT_TRUE(good == good_before);
  EXPECT_THAT(other.weight.to_vector(), ElementsAre(0, 0, 0, 0, 0, 0));
  EXPECT_EQ(Generator::current().seed(), 99u);
  EXPECT_EQ(state.step(), 0);
}

TEST(TrainingState, ForeignFoldersAreDataErrors) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  fs::create_directories(dir / "step-00000001");
  write_bytes(dir / "step-00000001/manifest.json", R"({"format": "other", "version": 1})");
  EXPECT_THAT(message_of<DataError>([&] { state.resume(dir / "step-00000001"); }),
              HasSubstr("expected the format cairn-training-state"));
  write_bytes(dir / "step-00000001/manifest.json",
              R"({"format": "cairn-training-state", "version": 99})");
  EXPECT_THAT(message_of<DataError>([&] { state.resume(dir / "step-00000001"); }),
              AllOf(HasSubstr("expected version 1 to 3"), HasSubstr("a newer release")));
  write_bytes(
      dir / "step-00000001/manifest.json",
      R"({"format": "cairn-training-state", "version": 4, "libraries": {"cairn": "9.1.2"}})");
  EXPECT_THAT(message_of<DataError>([&] { state.resume(dir / "step-00000001"); }),
              HasSubstr("got 4 (written by Cairn 9.1.2, a newer release"));
}

TEST(TrainingState, RejectsBadNamesAndOptions) {
  SmallState small;
  EXPECT_THROW(TrainingState({{"a.b", small}}), InvalidArgument);
  EXPECT_THROW(TrainingState({{"rank-1", small}}), InvalidArgument);
  EXPECT_THROW(TrainingState({{"a", small}, {"a", small}}), InvalidArgument);
  EXPECT_THROW(TrainingState({{"a", small}}, {}, {.keep = 0}), InvalidArgument);
  TrainingState state({{"a", small}});
  EXPECT_THROW(state.save("/tmp", -1), InvalidArgument);
  EXPECT_THROW(state.save_every(0, "/tmp"), InvalidArgument);
}

// A file that may not grow any further stands in for a full disk.
TEST(TrainingState, FullDiskLeavesTheOldStateIntact) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  state.save(dir.string(), 1);
  const auto previous_handler = signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit tiny = before;
  tiny.rlim_cur = 64;
  setrlimit(RLIMIT_FSIZE, &tiny);
  const std::string message = message_of<IoError>([&] { state.save(dir.string(), 2); });
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, previous_handler);
  EXPECT_THAT(message, AllOf(HasSubstr("state.safetensors"), HasSubstr("File too large")));
  EXPECT_THAT(names_in(dir.string()), ElementsAre("step-00000001"));
  EXPECT_THAT(find_damage(dir / "step-00000001"), IsEmpty());
  EXPECT_EQ(state.step(), 1);
}

// Where machines do not share the folder, or one sees it later than the others.
TEST(TrainingState, FilesThatRankZeroDoesNotSeeWholeAreNotCommitted) {
  struct Elsewhere : SystemCalls {
    std::function<void(const std::string&)> before;
    int status(int file, struct stat& status) override { return SystemCalls::status(file, status); }
    int status(const std::string& path, struct stat& status) override {
      if (before && path.ends_with(".tmp/rank-0.safetensors")) before(path);
      return SystemCalls::status(path, status);
    }
  } calls;
  const SystemCallsGuard guard(calls);
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  state.save(dir.string(), 1);
  calls.before = [](const std::string& path) { fs::resize_file(path, 20); };
  EXPECT_THAT(message_of<IoError>([&] { state.save(dir.string(), 2); }),
              AllOf(HasSubstr("got another rank-0.safetensors"), HasSubstr("shared")));
  calls.before = [](const std::string& path) { fs::remove(path); };
  EXPECT_THAT(message_of<IoError>([&] { state.save(dir.string(), 2); }),
              AllOf(HasSubstr("got no rank-0.safetensors"), HasSubstr("shared")));
  EXPECT_THAT(names_in(dir.string()), ElementsAre("step-00000001"));
}

TEST(TrainingState, ReadOnlyFolderIsAnIoError) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  state.save(dir.string(), 1);
  const auto all = fs::perms::all;
  fs::permissions(dir.string(), fs::perms::owner_read | fs::perms::owner_exec |
                                    fs::perms::others_read | fs::perms::others_exec);
  const bool is_root = geteuid() == 0;
  if (is_root) {
    ASSERT_EQ(seteuid(65534), 0);
  }
  const std::string message = message_of<IoError>([&] { state.save(dir.string(), 2); });
  if (is_root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  fs::permissions(dir.string(), all);
  EXPECT_THAT(message, AllOf(HasSubstr(dir.string()), HasSubstr("Permission denied")));
  EXPECT_THAT(names_in(dir.string()), ElementsAre("step-00000001"));
}

TEST(TrainingState, AFileInThePlaceOfTheFolderIsAnIoError) {
  const TemporaryFolder dir;
  write_bytes(dir / "file", "");
  SmallState small;
  TrainingState state({{"small", small}});
  EXPECT_THROW(state.save(dir / "file", 1), IoError);
  EXPECT_THROW(state.resume_latest(dir / "file"), IoError);
}

// Saves without pause, each step another state, until it is killed.
[[noreturn]] void save_for_ever(const std::string& dir, std::int64_t first) {
  core::set_num_threads(1);
  SmallState small;
  TrainingState state({{"small", small}}, {}, {.keep = 1});
  for (std::int64_t step = first;; ++step) {
    small.change(static_cast<float>(step));
    state.save(dir, step);
  }
}

std::string newest_name(const std::string& dir) {
  const std::vector<std::string> all = list_checkpoints(dir);
  return all.empty() ? "" : all.front();
}

std::int64_t newest_step(const std::string& dir) {
  SmallState fresh, expected;
  const auto info = TrainingState({{"small", fresh}}).resume_latest(dir);
  if (!info) return -1;
  expected.change(static_cast<float>(info->step));
  EXPECT_TRUE(fresh == expected) << info->step;
  return info->step;
}

// Whatever the moment of a kill, what it leaves resumes, to a whole state that is not older than
// one seen before.
TEST(TrainingState, KillsNeverLeaveADamagedState) {
  const TemporaryFolder dir;
  std::int64_t last = -1;
  for (useconds_t delay = 0; delay < 12000; delay += 900) {
    const std::string before = newest_name(dir.string());
    const pid_t child = fork();
    if (child == 0) save_for_ever(dir.string(), last + 1);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (newest_name(dir.string()) == before) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      usleep(200);
    }
    usleep(delay);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::int64_t step = newest_step(dir.string());
    EXPECT_GT(step, last);
    last = step;
  }
}

// ---- several ranks ----

template <class F>
void on_ranks(int size, F&& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&f, rank] { f(rank); });
  for (std::thread& thread : threads) thread.join();
}

TEST(TrainingStateRanks, EachKeepsItsGeneratorAndAllShareTheParts) {
  const TemporaryFolder dir;
  ThreadsWorld world(3);
  on_ranks(3, [&](int rank) {
    manual_seed(static_cast<std::uint64_t>(100 + rank));
    SmallState small;
    if (rank == 0) small.change(6);
    TrainingState({{"small", small}}, world.of(rank)).save(dir.string(), 7);
  });
  EXPECT_THAT(names_in(dir / "step-00000007"),
              ElementsAre("manifest.json", "rank-0.safetensors", "rank-1.safetensors",
                          "rank-2.safetensors", "state.safetensors"));
  on_ranks(3, [&](int rank) {
    SmallState small, expected;
    expected.change(6);
    const auto info = TrainingState({{"small", small}}, world.of(rank)).resume_latest(dir.string());
    EXPECT_EQ(info->world_size, 3);
    EXPECT_TRUE(small == expected);
    EXPECT_EQ(Generator::current().seed(), 100u + static_cast<unsigned>(rank));
  });
}

TEST(TrainingStateRanks, AnotherWorldSizeContinues) {
  const TemporaryFolder dir;
  ThreadsWorld two(2), four(4);
  on_ranks(2, [&](int rank) {
    manual_seed(static_cast<std::uint64_t>(50 + rank));
    SmallState small;
    TrainingState({{"small", small}}, two.of(rank)).save(dir.string(), 7);
  });
  std::vector<std::uint64_t> seeds(4);
  on_ranks(4, [&](int rank) {
    SmallState small;
    TrainingState({{"small", small}}, four.of(rank)).resume_latest(dir.string());
    seeds[static_cast<std::size_t>(rank)] = Generator::current().seed();
  });
  EXPECT_EQ(seeds[0], 50u);
  EXPECT_EQ(seeds[1], 51u);
  EXPECT_EQ(std::set<std::uint64_t>(seeds.begin(), seeds.end()).size(), 4u);
  SmallState alone;
  EXPECT_TRUE(TrainingState({{"small", alone}}).resume_latest(dir.string()));
}

TEST(TrainingStateRanks, AnErrorOnOneRankIsAnErrorOnAll) {
  const TemporaryFolder dir;
  ThreadsWorld world(2);
  std::vector<std::string> messages(2);
  on_ranks(2, [&](int rank) {
    SmallState small;
    if (rank == 0) small.weight = Tensor();  // cannot be saved
    TrainingState state({{"small", small}}, world.of(rank));
    messages[static_cast<std::size_t>(rank)] =
        message_of<core::Error>([&] { state.save(dir.string(), 7); });
  });
  EXPECT_THAT(messages[0], HasSubstr("expected a tensor for 'small.layer.weight'"));
  EXPECT_THAT(messages[1], AllOf(HasSubstr("[save of step 7]"), HasSubstr("on rank 0"),
                                 HasSubstr("small.layer.weight")));
  EXPECT_THAT(names_in(dir.string()), IsEmpty());
}

// One that the model of one rank does not fit is refused by all; what had loaded is loaded back,
// once, and what had refused is left alone.
TEST(TrainingStateRanks, ARefusalOnOneRankChangesNothingOnAny) {
  const TemporaryFolder dir;
  ThreadsWorld world(2);
  std::vector<std::string> messages(2);
  on_ranks(2, [&](int rank) {
    SmallState first, second;
    TrainingState({{"first", first}, {"second", second}}, world.of(rank)).save(dir.string(), 7);
    first.change(3);
    second.change(4);
    if (rank == 1) second.weight = Tensor::zeros({5});
    const SmallState first_before = first.copy(), second_before = second.copy();
    TrainingState state({{"first", first}, {"second", second}}, world.of(rank));
    manual_seed(77);
    messages[static_cast<std::size_t>(rank)] =
        message_of<core::Error>([&] { state.resume_latest(dir.string()); });
    EXPECT_TRUE(first == first_before) << rank;
    EXPECT_TRUE(second == second_before) << rank;
    EXPECT_EQ(first.loads, 2) << rank;
    EXPECT_EQ(second.loads, rank == 1 ? 0 : 2) << rank;
    EXPECT_EQ(Generator::current().seed(), 77u) << rank;
    EXPECT_EQ(state.step(), 0) << rank;
  });
  EXPECT_THAT(messages[0], AllOf(HasSubstr("on rank 1"), HasSubstr("layer.weight [5]")));
  EXPECT_THAT(messages[1], HasSubstr("in 'second'"));
}

TEST(TrainingStateRanks, SavingOnSomeRanksOnlyEndsInAnError) {
  const TemporaryFolder dir;
  ThreadsWorld world(2);
  world.set_timeout(std::chrono::milliseconds(50));
  SmallState small;
  TrainingState state({{"small", small}}, world.of(0));
  EXPECT_THAT(message_of<core::CommunicationError>([&] { state.save(dir.string(), 7); }),
              HasSubstr("save of step 7"));
  EXPECT_THAT(names_in(dir.string()), IsEmpty());
}

TEST(TrainingStateRanks, AllFallBackToTheSameCheckpoint) {
  const TemporaryFolder dir;
  ThreadsWorld world(2);
  on_ranks(2, [&](int rank) {
    SmallState small;
    TrainingState state({{"small", small}}, world.of(rank));
    state.save(dir.string(), 1);
    state.save(dir.string(), 2);
  });
  fs::resize_file(dir / "step-00000002/rank-1.safetensors", 20);
  ::testing::internal::CaptureStderr();
  on_ranks(2, [&](int rank) {
    SmallState small;
    const auto info = TrainingState({{"small", small}}, world.of(rank)).resume_latest(dir.string());
    EXPECT_EQ(info->step, 1) << rank;
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("rank-1.safetensors"));
}

}  // namespace
}  // namespace cairn::checkpointing
