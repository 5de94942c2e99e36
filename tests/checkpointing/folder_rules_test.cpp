// What stays in a folder of checkpoints, who may save there, and that no flipped bit passes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <random>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/parallel_for.h"
#include "checkpointing/simulated_disk.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "support/message_of.h"

namespace cairn::checkpointing {
namespace {

namespace fs = std::filesystem;
using core::InvalidArgument;
using core::IoError;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::int64_t> steps_in(const std::string& dir) {
  std::vector<std::int64_t> steps;
  for (const std::string& path : list_checkpoints(dir)) {
    steps.push_back(summarize_checkpoint(path).step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

TEST(Keep, EveryNthStaysBesideTheLast) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}}, {}, {.keep = 2, .keep_every = 40});
  for (int i = 0; i < 130; ++i) state.save_every(10, dir.string());
  EXPECT_THAT(steps_in(dir.string()), ElementsAre(40, 80, 120, 130));
}

TEST(Keep, TheBestByAMetricStay) {
  const TemporaryFolder dir;
  const std::vector<double> losses = {5, 1, 4, 2, std::numeric_limits<double>::quiet_NaN(), 3, 6};
  for (const bool lower : {true, false}) {
    SmallState small;
    const std::string folder = dir / (lower ? "lower" : "higher");
    TrainingState state({{"small", small}}, {},
                        {.keep = 1, .keep_best = 2, .best = lower ? Best::lowest : Best::highest});
    for (std::size_t i = 0; i < losses.size(); ++i) {
      state.save(folder, static_cast<std::int64_t>(i + 1), losses[i]);
    }
    const std::vector<std::int64_t> lowest = {2, 4, 7}, highest = {1, 7};  // 7 is the last, too
    EXPECT_EQ(steps_in(folder), lower ? lowest : highest);
    EXPECT_EQ(summarize_checkpoint(folder + "/step-00000007").metric, 6);
  }
}

TEST(Keep, TheBestAreNotKeptByAGuessOfWhichMetricThatIs) {
  const TemporaryFolder dir;
  SmallState small;
  const auto names_both = HasSubstr(
      "got keep_best 2 alone (best = Best::lowest for a loss, Best::highest for an accuracy)");
  const auto trains = [&] { TrainingState({{"small", small}}, {}, {.keep_best = 2}); };
  EXPECT_THAT(test::message_of<InvalidArgument>(trains), names_both);
  const auto prunes = [&] { prune_checkpoints(dir.string(), {.keep_best = 2}); };
  EXPECT_THAT(test::message_of<InvalidArgument>(prunes), names_both);
}

TEST(Keep, AMetricThatIsNoNumberIsNone) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  const std::string path = state.save(dir.string(), 1, std::numeric_limits<double>::infinity());
  EXPECT_FALSE(summarize_checkpoint(path).metric);
}

void flip_last_bit_of(const std::string& path) {
  std::string bytes = read_bytes(path + "/state.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(path + "/state.safetensors", bytes);
}

// Of another run, which fills up, a good one stays in the place of one that was found damaged.
TEST(Keep, DamagedOnesDoNotCount) {
  const TemporaryFolder dir;
  SmallState small;
  for (const std::int64_t first : {1, 10}) {  // two runs
    TrainingState run({{"small", small}}, {}, {.keep = 9});
    run.save(dir.string(), first);
    run.save(dir.string(), 2 * first);
  }
  flip_last_bit_of(dir / "step-00000020");
  TrainingState state({{"small", small}}, {}, {.keep = 3});
  EXPECT_EQ(state.resume_latest(dir.string())->step, 10);
  state.save(dir.string(), 30);
  EXPECT_THAT(steps_in(dir.string()), ElementsAre(2, 10, 20, 30));  // 20 has not enough before it
}

TEST(Keep, ADamagedOneIsNotTheBest) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState run({{"small", small}}, {}, {.keep = 9});
  run.save(dir.string(), 1, 1.0);
  run.save(dir.string(), 2, 0.5);
  flip_last_bit_of(dir / "step-00000002");
  TrainingState state({{"small", small}}, {}, {.keep = 1, .keep_best = 1, .best = Best::lowest});
  EXPECT_EQ(state.resume_latest(dir.string())->step, 1);
  state.save(dir.string(), 3, 3.0);
  EXPECT_THAT(steps_in(dir.string()), ElementsAre(1, 3));
}

// On a full disk the one too many of a killed run would block all later saves.
TEST(Keep, ASaveThatFailsRemovesWhatIsTooMany) {
  struct FullDisk : SystemCalls {
    bool full = false;
    ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
      if (!full) return SystemCalls::write(file, data, bytes, offset);
      errno = ENOSPC;
      return -1;
    }
  } disk;
  const SystemCallsGuard guard(disk);
  const TemporaryFolder dir;
  SmallState small;
  TrainingState many({{"small", small}});
  for (int step = 1; step <= 3; ++step) many.save(dir.string(), step);
  TrainingState one({{"small", small}}, {}, {.keep = 1});
  one.resume_latest(dir.string());
  disk.full = true;
  EXPECT_THROW(one.save(dir.string(), 4), IoError);
  EXPECT_THAT(steps_in(dir.string()), ElementsAre(3));
}

// Killed between giving a checkpoint its name and removing the oldest, a run left no room for the
// next one to begin.
TEST(Keep, AFullDiskIsMadeRoomOnBeforeTheFirstStep) {
  struct SmallDisk : SystemCalls {
    std::string folder;
    std::size_t most = 3;
    int reason = ENOSPC;
    ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
      if (steps_in(folder).size() < most) {
        return SystemCalls::write(file, data, bytes, offset);
      }
      errno = reason;
      return -1;
    }
  } disk;
  const TemporaryFolder dir;
  SmallState small;
  TrainingState killed({{"small", small}}, {}, {.keep = 9});
  for (int step = 1; step <= 3; ++step) killed.save(dir.string(), step);
  flip_last_bit_of(dir / "step-00000003");
  disk.folder = dir.string();
  const SystemCallsGuard guard(disk);
  const auto resume = [&](int keep) {
    return TrainingState({{"small", small}}, {}, {.keep = keep}).resume_latest(dir.string());
  };
  EXPECT_THROW(resume(2), IoError);  // none of them is needless: one is damaged
  EXPECT_THAT(steps_in(dir.string()), ElementsAre(1, 2, 3));
  for (const int another : {EIO, EROFS, EACCES}) {
    disk.reason = another;
    EXPECT_THROW(resume(1), IoError);
    EXPECT_THAT(steps_in(dir.string()), ElementsAre(1, 2, 3)) << "is not full: " << another;
  }
  disk.reason = EDQUOT;
  EXPECT_EQ(resume(1)->step, 2);
  EXPECT_THAT(steps_in(dir.string()), ElementsAre(2, 3));
}

TEST(Folder, ManifestNamesTheLibraries) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"small", small}}).save(dir.string(), 1);
  const LibraryVersions libraries = summarize_checkpoint(path).libraries;
  ASSERT_FALSE(libraries.empty());
  EXPECT_EQ(libraries[0].first, "cairn");
}

TEST(Folder, NoFolderOnlyCounts) {
  SmallState small;
  TrainingState state({{"small", small}});
  EXPECT_FALSE(state.resume_latest(""));
  while (state.step() < 5) EXPECT_FALSE(state.save_every(1, ""));
  EXPECT_THROW(state.save("", 6), InvalidArgument);
}

TEST(Folder, AProgramThatOnlyLoadsLeavesNothing) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState({{"small", small}}).save(dir / "a", 1);
  fs::remove(dir / "a/.lock");
  TrainingState reader({{"small", small}}, {}, {.read_only = true});
  EXPECT_TRUE(reader.resume_latest(dir / "a"));
  EXPECT_FALSE(fs::exists(dir / "a/.lock"));
  EXPECT_FALSE(reader.resume_latest(dir / "none"));
  EXPECT_FALSE(fs::exists(dir / "none"));
  EXPECT_THROW(reader.save(dir / "a", 2), InvalidArgument);
}

// ---- what cannot be written is known before the first step

class Unprivileged {
 public:
  Unprivileged() {
    if (geteuid() == 0) changed_ = seteuid(65534) == 0;
  }
  ~Unprivileged() {
    if (changed_) changed_ = seteuid(0) != 0;
  }

 private:
  bool changed_ = false;
};

TEST(Folder, ThatCannotBeWrittenIsFoundBeforeTheFirstSave) {
  const TemporaryFolder dir;
  SmallState small;
  fs::permissions(dir.string(), fs::perms::owner_read | fs::perms::owner_exec |
                                    fs::perms::others_read | fs::perms::others_exec);
  for (const bool resumes : {true, false}) {
    TrainingState state({{"small", small}});
    const Unprivileged user;
    const std::string message = message_of<IoError>([&] {
      if (resumes) state.resume_latest(dir.string());
      if (!resumes) state.save_every(1000000, dir.string());
    });
    EXPECT_THAT(message, AllOf(HasSubstr("expected a folder that checkpoints can be written to"),
                               HasSubstr(dir.string()), HasSubstr("Permission denied")));
    EXPECT_EQ(state.step(), 0);
  }
  fs::permissions(dir.string(), fs::perms::owner_all);
}

// ---- one writer

// A process that has resumed from `dir`, saves every `pause` microseconds (0: never), and lives
// until it is killed. Returns when it holds the folder.
pid_t start_writer(const std::string& dir) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    core::set_num_threads(1);
    SmallState small;
    TrainingState state({{"small", small}});
    state.resume_latest(dir);
    [[maybe_unused]] const auto told = write(ready[1], "+", 1);
    while (true) pause();
  }
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  return child;
}

// Whoever may write in a folder of checkpoints could have another user's files overwritten.
TEST(Folder, LinksInItAreNotFollowed) {
  const TemporaryFolder dir;
  SmallState small;
  write_bytes(dir / "victim", "precious");
  std::filesystem::create_directory(dir / "runs");
  std::filesystem::create_symlink("../victim", dir / "runs/.probe-rank-0");
  TrainingState state({{"small", small}});
  state.resume_latest(dir / "runs");
  EXPECT_FALSE(exists(dir / "runs/.probe-rank-0"));
  std::filesystem::create_directory(dir / "other");
  std::filesystem::create_symlink("../victim", dir / "other/.lock");
  EXPECT_THAT(message_of<core::IoError>([&] { state.save(dir / "other", 1); }),
              AllOf(HasSubstr(".lock cannot be opened"), HasSubstr("symbolic links")));
  std::filesystem::create_directory(dir / "third");
  std::filesystem::create_hard_link(dir / "victim", dir / "third/.lock");
  EXPECT_THAT(message_of<core::IoError>([&] { state.save(dir / "third", 1); }),
              AllOf(HasSubstr(".lock cannot be opened"), HasSubstr("no file of its own")));
  EXPECT_EQ(read_bytes(dir / "victim"), "precious");
}

TEST(Writer, ASecondOneIsToldWhoTheFirstIs) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"small", small}}).save(dir.string(), 1);
  const std::string before = read_bytes(path + "/manifest.json");
  const pid_t other = start_writer(dir.string());
  TrainingState state({{"small", small}});
  const std::string who = "process " + std::to_string(other) + " on ";
  EXPECT_THAT(message_of<IoError>([&] { state.resume_latest(dir.string()); }),
              AllOf(HasSubstr("the only one that saves in '" + dir.string()), HasSubstr(who)));
  TrainingState reader({{"small", small}}, {}, {.read_only = true});
  EXPECT_TRUE(reader.resume_latest(dir.string()));
  EXPECT_TRUE(state.resume(path).step == 1);
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
  EXPECT_EQ(read_bytes(path + "/manifest.json"), before);
  EXPECT_TRUE(state.resume_latest(dir.string()));  // the lock died with its holder
  state.save(dir.string(), 2);
}

TEST(Writer, ARunThatGoesOnInAnotherFolderLocksThatOne) {
  SimulatedDisk disk;
  const SystemCallsGuard guard(disk);
  SmallState small;
  { TrainingState({{"small", small}}).save("/runs/b", 1); }
  TrainingState state({{"small", small}});
  state.save("/runs/a", 1);
  disk.lock_from_elsewhere("/runs/b/.lock");
  EXPECT_THAT(message_of<IoError>([&] { state.save("/runs/b", 2); }),
              HasSubstr("the only one that saves in '/runs/b'"));
}

TEST(Writer, StatesOfOneProcessShareTheFolder) {
  const TemporaryFolder dir;
  SmallState a, b;
  TrainingState first({{"small", a}}), second({{"small", b}});
  for (int step = 1; step < 6; ++step) {
    first.save_async(dir.string(), step);
    second.save(dir.string(), step + 100);
  }
  first.finish();
  for (const std::string& path : list_checkpoints(dir.string())) {
    EXPECT_THAT(find_damage(path), IsEmpty());
  }
}

// ---- no flipped bit passes

// Flips the bit in the file, looks whether that is found, and flips it back.
bool is_found(const std::string& checkpoint, const std::string& file, std::uint64_t bit) {
  const int descriptor = ::open((checkpoint + "/" + file).c_str(), O_RDWR | O_CLOEXEC);
  const auto at = static_cast<off_t>(bit / 8);
  unsigned char byte = 0;
  EXPECT_EQ(pread(descriptor, &byte, 1, at), 1);
  const auto flipped = static_cast<unsigned char>(byte ^ (1U << bit % 8));
  EXPECT_EQ(pwrite(descriptor, &flipped, 1, at), 1);
  const bool found = !find_damage(checkpoint).empty();
  EXPECT_EQ(pwrite(descriptor, &byte, 1, at), 1);
  close(descriptor);
  return found;
}

struct Weights : core::Stateful {
  explicit Weights(std::int64_t n) : weight(Tensor::full({n}, 0.25)) {}
  Tensor weight;
  StateDict state_dict() const override {
    StateDict state;
    state.set("weight", weight);
    state.set("rate", 0.1);
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    core::copy_bytes(state.tensor("weight"), weight);
  }
};

const std::vector<std::string> kFiles = {"manifest.json", "rank-0.safetensors",
                                         "state.safetensors"};

TEST(FlippedBit, EveryOneOfASmallCheckpointIsFound) {
  const TemporaryFolder dir;
  Weights weights(3);
  const std::string path = TrainingState({{"w", weights}}).save(dir.string(), 1, 0.5);
  std::uint64_t bits = 0, missed = 0;
  for (const std::string& file : kFiles) {
    const std::uint64_t n = fs::file_size(path + "/" + file) * 8;
    for (std::uint64_t bit = 0; bit < n; ++bit) {
      const bool found = is_found(path, file, bit);
      if (!found && missed++ < 5) ADD_FAILURE() << file << " bit " << bit;
    }
    bits += n;
  }
  EXPECT_EQ(missed, 0u);
  EXPECT_GT(bits, 10000u);
  EXPECT_THAT(find_damage(path), IsEmpty());
}

TEST(FlippedBit, RandomOnesOfALargerCheckpointAreFound) {
  const TemporaryFolder dir;
  Weights weights(1 << 16);
  const std::string path = TrainingState({{"w", weights}}).save(dir.string(), 1);
  std::mt19937_64 random(1);
  int missed = 0;
  for (int i = 0; i < 10000; ++i) {
    const std::string& file = kFiles[i % 10 == 0 ? 0 : i % 10 == 1 ? 1 : 2];
    missed += !is_found(path, file, random() % (fs::file_size(path + "/" + file) * 8));
  }
  EXPECT_EQ(missed, 0);
  EXPECT_THAT(find_damage(path), IsEmpty());
}

}  // namespace
}  // namespace cairn::checkpointing
