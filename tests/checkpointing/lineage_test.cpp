// Which save continues which: runs that go back to an earlier step, or start anew in a folder that
// another run has used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "checkpointing/simulated_disk.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "checkpointing/threads_world.h"
#include "support/test_folder.h"

namespace cairn::checkpointing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// One process: a part and its training state.
struct Trainer {
  explicit Trainer(int keep = 3) : state({{"small", part}}, {}, {.keep = keep}) {}
  void save(const TemporaryFolder& dir, std::initializer_list<int> steps) {
    for (const int step : steps) {
      part.change(static_cast<float>(step));
      state.save(dir.string(), step);
    }
  }
  SmallState part;
  TrainingState state;
};

std::string step_path(const TemporaryFolder& dir, int step) {
  return dir / ("step-" +
                std::string(step < 100    ? "000000"
                            : step < 1000 ? "00000"
                                          : "0000") +
                std::to_string(step));
}

std::vector<std::int64_t> steps_of(const std::vector<std::string>& paths) {
  std::vector<std::int64_t> steps;
  for (const std::string& path : paths) steps.push_back(summarize_checkpoint(path).step);
  return steps;
}

std::int64_t latest(const TemporaryFolder& dir) {
  Trainer trainer;
  const auto info = trainer.state.resume_latest(dir.string());
  return info ? info->step : -1;
}

TEST(Lineage, GoingBackToAnEarlierStepLeavesTheLaterOnesBehind) {
  const TemporaryFolder dir;
  Trainer().save(dir, {800, 900, 1000});
  Trainer trainer;
  trainer.state.resume(step_path(dir, 800));
  trainer.save(dir, {810});
  EXPECT_EQ(latest(dir), 810);
  EXPECT_THAT(steps_of(newest_line(dir.string())), ElementsAre(810, 800));
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(810, 1000, 800));  // 3 in all
  trainer.save(dir, {820});
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(820, 810, 800));
  trainer.save(dir, {830});
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(830, 820, 810));
  EXPECT_EQ(latest(dir), 830);
}

TEST(Lineage, StartingAnewInAnOldFolderIsTheNewestRun) {
  const TemporaryFolder dir;
  Trainer(2).save(dir, {900, 1000});
  Trainer trainer(2);
  trainer.save(dir, {10});
  EXPECT_EQ(latest(dir), 10);
  EXPECT_THAT(steps_of(newest_line(dir.string())), ElementsAre(10));
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(10, 1000));
  trainer.save(dir, {20});
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(20, 10));
}

TEST(Lineage, DamageGoesBackAlongTheLineNotToTheOneLeftBehind) {
  const TemporaryFolder dir;
  Trainer().save(dir, {800, 900, 1000});
  Trainer trainer;
  trainer.state.resume(step_path(dir, 800));
  trainer.save(dir, {810});
  for (const char* file : {"/state.safetensors", "/manifest.json"}) {
    const std::string path = step_path(dir, 810) + file, bytes = read_bytes(path);
    write_bytes(path, bytes.substr(0, bytes.size() - 8));
    EXPECT_EQ(latest(dir), 800) << file;
    fs::remove(path);
    EXPECT_EQ(latest(dir), 800) << file;
    write_bytes(path, bytes);
  }
  EXPECT_EQ(latest(dir), 810);
}

TEST(Lineage, ALineWithoutAGoodCheckpointIsAnErrorThatNamesTheOthers) {
  const TemporaryFolder dir;
  Trainer().save(dir, {900, 1000});
  Trainer().save(dir, {10});
  fs::remove(step_path(dir, 10) + "/rank-0.safetensors");
  Trainer trainer;
  EXPECT_THAT(message_of<core::DataError>([&] { trainer.state.resume_latest(dir.string()); }),
              AllOf(HasSubstr("1 damaged"), HasSubstr("2 more are of runs that were left behind")));
  EXPECT_EQ(trainer.state.resume(step_path(dir, 1000)).step, 1000);
}

TEST(Lineage, HoldsAcrossProcessesWorldSizesAndKeep) {
  const TemporaryFolder dir;
  Trainer(4).save(dir, {10, 20, 30, 40});
  ThreadsWorld world(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      SmallState part;
      TrainingState state({{"small", part}}, world.of(rank), {.keep = 3});
      state.resume(step_path(dir, 20));
      state.save(dir.string(), 25);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(25, 20, 10));
  Trainer trainer(2);
  EXPECT_EQ(trainer.state.resume_latest(dir.string())->step, 25);
  trainer.save(dir, {27});
  EXPECT_THAT(steps_of(list_checkpoints(dir.string())), ElementsAre(27, 25));
}

// A manifest names a hundred saves at most; a job has more, and goes on after each.
TEST(Lineage, ARunNeverGivesANumberThatItHasGiven) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  state.save(dir.string(), 1);
  state.save(dir.string(), 2);
  std::filesystem::remove_all(dir / "step-00000001");
  std::filesystem::remove_all(dir / "step-00000002");
  state.save(dir.string(), 3);
  EXPECT_EQ(summarize_checkpoint(dir / "step-00000003").save, 3);
}

TEST(Lineage, HasNoEnd) {
  SimulatedDisk disk;
  const SystemCallsGuard guard(disk);
  SmallState part;
  for (int job = 0; job < 3; ++job) {
    TrainingState state({{"small", part}});
    state.resume_latest("/runs");
    EXPECT_EQ(state.step(), 60 * job);
    for (int i = 0; i < 60; ++i) state.save("/runs", state.step() + 1);
  }
}

TEST(Lineage, AnotherFolderStartsALineThatTheFirstDoesNotDisturb) {
  const TemporaryFolder dir, other;
  Trainer trainer;
  trainer.save(dir, {10, 20});
  Trainer(2).save(other, {5, 6});
  trainer.save(other, {30});
  EXPECT_THAT(steps_of(newest_line(other.string())), ElementsAre(30));
  trainer.save(dir, {40});
  EXPECT_THAT(steps_of(newest_line(dir.string())), ElementsAre(40, 20, 10));
}

TEST(Lineage, AResumeThatFindsNothingStartsALine) {
  const TemporaryFolder dir, empty;
  Trainer trainer;
  trainer.save(dir, {10});
  EXPECT_FALSE(trainer.state.resume_latest(empty.string()));
  trainer.save(dir, {5});
  EXPECT_THAT(steps_of(newest_line(dir.string())), ElementsAre(5));
}

TEST(Lineage, ARenamedFolderIsDamaged) {
  const TemporaryFolder dir;
  Trainer().save(dir, {10, 20});
  fs::rename(step_path(dir, 10), step_path(dir, 50));
  EXPECT_THAT(find_damage(step_path(dir, 50)), ElementsAre(HasSubstr("step 50")));
  EXPECT_EQ(latest(dir), 20);
  fs::rename(step_path(dir, 50), dir / "best");  // a name that says no step is fine
  EXPECT_THAT(find_damage(dir / "best"), IsEmpty());
}

// data/version_1 was written by the release before saves were counted: steps 800, 900 and 1000 of a
// SmallState that was changed to step / 100.
class Version1 : public ::testing::Test {
 protected:
  Version1() {
    fs::copy(test::test_folder() + "/checkpointing/data/version_1", dir_.string(),
             fs::copy_options::recursive);
  }
  const TemporaryFolder dir_;
};

TEST_F(Version1, LoadsBitForBit) {
  Trainer trainer;
  SmallState expected;
  expected.change(10);
  EXPECT_EQ(trainer.state.resume_latest(dir_.string())->step, 1000);
  EXPECT_TRUE(trainer.part == expected);
  EXPECT_EQ(Generator::current().seed(), 1000u);
}

TEST_F(Version1, FallsBackInTheOrderOfSteps) {
  fs::resize_file(step_path(dir_, 1000) + "/state.safetensors", 300);
  EXPECT_EQ(latest(dir_), 900);
  fs::remove(step_path(dir_, 900) + "/manifest.json");
  EXPECT_EQ(latest(dir_), 800);
}

TEST_F(Version1, IsContinuedFromAnyStep) {
  Trainer trainer;
  trainer.state.resume(step_path(dir_, 900) + "/");
  trainer.save(dir_, {910});
  EXPECT_EQ(latest(dir_), 910);
  EXPECT_THAT(steps_of(newest_line(dir_.string())), ElementsAre(910, 900, 800));
  EXPECT_THAT(steps_of(list_checkpoints(dir_.string())), ElementsAre(910, 900, 800));
}

}  // namespace
}  // namespace cairn::checkpointing
