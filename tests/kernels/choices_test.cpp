#include "choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "checkpointing/temporary_folder.h"

namespace cairn::kernels {
namespace {

using checkpointing::read_bytes;
using checkpointing::TemporaryFolder;
using checkpointing::write_bytes;
using testing::HasSubstr;
using testing::Optional;

TEST(Choices, AreKeptForTheNextRun) {
  const TemporaryFolder folder;
  const std::string deep = folder / "not/there/yet";
  Choices first("products", "machine", deep);
  EXPECT_EQ(first.find("work"), std::nullopt);
  EXPECT_EQ(first.keep("work", "fast"), "fast");
  EXPECT_THAT(first.find("work"), Optional(std::string("fast")));
  EXPECT_THAT(Choices("products", "machine", deep).find("work"), Optional(std::string("fast")));
}

TEST(Choices, OfOtherMachinesAndKindsStandBeside) {
  const TemporaryFolder folder;
  Choices("products", "one", folder.string()).keep("work", "a");
  Choices("products", "two", folder.string()).keep("work", "b");
  Choices("other", "one", folder.string()).keep("work", "c");
  EXPECT_THAT(Choices("products", "one", folder.string()).find("work"), Optional(std::string("a")));
  EXPECT_THAT(Choices("products", "two", folder.string()).find("work"), Optional(std::string("b")));
  EXPECT_EQ(Choices("products", "three", folder.string()).find("work"), std::nullopt);
}

TEST(Choices, TheFirstWrittenStands) {
  const TemporaryFolder folder;
  Choices early("products", "machine", folder.string()),
      late("products", "machine", folder.string());
  EXPECT_EQ(late.find("work"), std::nullopt);  // has read the file by now
  early.keep("work", "a");
  EXPECT_EQ(late.keep("work", "b"), "a");
  EXPECT_THAT(late.find("work"), Optional(std::string("a")));
}

// What a process went by from memory does not change under it.
TEST(Choices, StandForALifetime) {
  const TemporaryFolder folder;
  Choices early("products", "machine", folder.string());
  early.keep("work", "a");
  std::filesystem::remove(folder / "products.json");
  Choices("products", "machine", folder.string()).keep("work", "b");
  early.keep("another", "c");
  EXPECT_THAT(early.find("work"), Optional(std::string("a")));
}

// Each with an object of its own, as processes have.
TEST(Choices, StandNoLongerThanTheyAreToldTo) {
  const TemporaryFolder folder;
  const std::time_t now = std::time(nullptr);
  const auto again = [&] { return Choices("products", "machine", folder.string()); };
  Choices first = again(), beside = again();
  EXPECT_EQ(beside.find("other"), std::nullopt);  // has read the file by now
  EXPECT_EQ(first.keep("old", "a", now - 1), "a");
  EXPECT_EQ(first.keep("work", "a", now + 1000), "a");
  EXPECT_THAT(first.find("old"), Optional(std::string("a"))) << "as long as this process lives";
  EXPECT_THAT(again().find("work"), Optional(std::string("a")));
  EXPECT_EQ(again().keep("work", "b"), "a");
  EXPECT_EQ(again().find("old"), std::nullopt);
  EXPECT_EQ(beside.keep("other", "c"), "c");
  EXPECT_EQ(again().keep("old", "b"), "b");  // for good
  EXPECT_EQ(again().keep("old", "c", now + 1000), "b");
  EXPECT_EQ(again().used().size(), 0u);
  EXPECT_EQ(first.used().at("work"), "a");
}

TEST(Choices, AllWritersEndWithTheSame) {
  constexpr int kWriters = 8, kWorks = 25;
  const TemporaryFolder folder;
  std::vector<Choices::Ways> seen(kWriters);
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    writers.emplace_back([&, i] {
      Choices choices("products", "machine", folder.string());
      for (int work = 0; work < kWorks; ++work) {
        const std::string name = std::to_string((work + i * 3) % kWorks);
        seen[i][name] = choices.keep(name, "of writer " + std::to_string(i));
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  Choices after("products", "machine", folder.string());
  for (const auto& [work, way] : seen[0]) EXPECT_THAT(after.find(work), Optional(way));
  for (int i = 1; i < kWriters; ++i) EXPECT_EQ(seen[i], seen[0]);
}

TEST(Choices, PreferredOnesWinAndAreNotWritten) {
  const TemporaryFolder folder;
  Choices choices("products", "machine", folder.string());
  choices.keep("timed", "a");
  choices.prefer({{"timed", "b"}, {"saved", "c"}});
  EXPECT_THAT(choices.find("timed"), Optional(std::string("b")));
  EXPECT_EQ(choices.keep("saved", "d"), "c");
  EXPECT_EQ(choices.used(), (Choices::Ways{{"timed", "b"}, {"saved", "c"}}));
  Choices after("products", "machine", folder.string());
  EXPECT_THAT(after.find("timed"), Optional(std::string("a")));
  EXPECT_EQ(after.find("saved"), std::nullopt);
}

TEST(Choices, UsedOnesAreThoseFoundOrKept) {
  const TemporaryFolder folder;
  Choices("products", "machine", folder.string()).keep("never asked", "a");
  Choices choices("products", "machine", folder.string());
  EXPECT_EQ(choices.find("unknown"), std::nullopt);
  choices.keep("kept", "b");
  EXPECT_EQ(choices.used(), (Choices::Ways{{"kept", "b"}}));
}

class UnusableFile : public testing::TestWithParam<std::string> {};

TEST_P(UnusableFile, IsLeftAloneWithOneWarning) {
  const TemporaryFolder folder;
  const std::string path = folder / "products.json";
  write_bytes(path, GetParam());
  Choices choices("products", "machine", folder.string());
  testing::internal::CaptureStderr();
  EXPECT_EQ(choices.find("work"), std::nullopt);
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_THAT(warning, HasSubstr(path));
  EXPECT_THAT(warning, HasSubstr("CAIRN_CACHE"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(choices.keep("work", "a"), "a");
  EXPECT_THAT(choices.find("work"), Optional(std::string("a")));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(read_bytes(path), GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Damaged, UnusableFile,
    testing::Values("", "{", "[]", "notes of somebody", R"({"format": 2, "machines": {}})",
                    R"({"machines": {}})", R"({"format": 1})",
                    R"({"format": 1, "machines": {"machine": {"work": 3}}})",
                    R"({"format": 1, "machines": {"machine": {"work": "a"}})"));

TEST(Choices, GoOnInMemoryWhereTheFolderCannotBeMade) {
  const TemporaryFolder folder;
  write_bytes(folder / "file", "");
  Choices choices("products", "machine", folder / "file/folder");
  testing::internal::CaptureStderr();
  EXPECT_EQ(choices.keep("work", "a"), "a");
  EXPECT_EQ(choices.keep("more", "b"), "b");
  EXPECT_THAT(choices.find("work"), Optional(std::string("a")));
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_EQ(warnings.find("[warn]"), warnings.rfind("[warn]"));
  EXPECT_THAT(warnings, HasSubstr("in memory"));
}

TEST(Choices, WithoutAFolderStayInMemory) {
  Choices choices("products", "machine", "");
  testing::internal::CaptureStderr();
  EXPECT_EQ(choices.keep("work", "a"), "a");
  EXPECT_THAT(choices.find("work"), Optional(std::string("a")));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

class ChoicesFolder : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      before_.emplace_back(value == nullptr ? "" : value);
    }
  }
  void TearDown() override {
    for (std::size_t i = 0; i < before_.size(); ++i) setenv(kNames[i], before_[i].c_str(), 1);
  }
  static void set(const char* cache, const char* xdg, const char* home) {
    setenv(kNames[0], cache, 1);
    setenv(kNames[1], xdg, 1);
    setenv(kNames[2], home, 1);
  }

 private:
  static constexpr const char* kNames[] = {"CAIRN_CACHE", "XDG_CACHE_HOME", "HOME"};
  std::vector<std::string> before_;
};

TEST_F(ChoicesFolder, FollowsTheEnvironment) {
  set("/a", "/b", "/c");
  EXPECT_EQ(choices_folder(), "/a");
  set("", "/b", "/c");
  EXPECT_EQ(choices_folder(), "/b/cairn");
  set("", "", "/c");
  EXPECT_EQ(choices_folder(), "/c/.cache/cairn");
  set("", "", "");
  EXPECT_EQ(choices_folder(), "");
  set("off", "/b", "/c");
  EXPECT_EQ(choices_folder(), "");
}

}  // namespace
}  // namespace cairn::kernels
