// Folders that cannot be written, and disks that fill up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <thread>

#include "cairn/core/error.h"
#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "support/expect_error.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using testing::HasSubstr;

TEST(Unwritable, AFolderThatCannotBeMadeIsAnErrorAtOnce) {
  const test::TemporaryFolder folder;
  std::ofstream(folder / "file") << "x";
  test::expect_error<core::IoError>([&] { observe::Run((folder / "file" / "run").string()); },
                                    {"file/run", "Not a directory"});
}

TEST(Unwritable, AFileThatCannotBeWrittenIsAnErrorAtOnce) {
  const test::TemporaryFolder folder;
  std::filesystem::create_directory(folder / "metrics.csv");
  test::expect_error<core::IoError>([&] { observe::Run run(folder.string()); },
                                    {"metrics.csv", "Is a directory"});
}

/// No file of this process may grow beyond so many bytes: as a disk that is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST(FullDisk, TheRunGoesOnWarnsOnceAndSaysAtItsEndWhatIsMissing) {
  const test::TemporaryFolder folder;
  testing::internal::CaptureStderr();
  constexpr int kBefore = 10, kDuring = 400, kAfter = 10;
  {
    observe::Run run(folder.string(), {.renew_seconds = 0});
    const auto tell = [&](int steps) {
      for (int i = 0; i < steps; ++i) run.step({{"loss", 0.5}});
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    };
    tell(kBefore);
    {
      const FullDisk full(6000);
      for (int i = 0; i < 4; ++i) tell(kDuring / 4);
    }
    tell(kAfter);  // there is room again
  }
  const std::string said = testing::internal::GetCapturedStderr();
  std::size_t warnings = 0;
  for (std::size_t at = 0; (at = said.find("warn]", at)) != std::string::npos; ++at) ++warnings;
  EXPECT_EQ(warnings, 2u) << said;
  EXPECT_THAT(said, HasSubstr("the run goes on"));
  EXPECT_THAT(said, HasSubstr("missing in " + folder.string()));
  EXPECT_THAT(said, HasSubstr("metrics.jsonl"));
  EXPECT_THAT(said, HasSubstr("File too large"));

  // Whole lines, the first ones and the last ones; what is missing is as much as was said.
  const auto steps = test::step_lines(folder.string());
  EXPECT_EQ(steps.front()["step"], 1);
  EXPECT_EQ(steps.back()["step"], kBefore + kDuring + kAfter);
  EXPECT_THAT(said, HasSubstr(core::str(
                        "metrics.jsonl: ", kBefore + kDuring + kAfter - steps.size(), " records")));
  const auto csv = test::lines_of(folder / "metrics.csv");
  for (const std::string& line : csv)
    EXPECT_EQ(std::count(line.begin(), line.end(), ','),
              std::count(csv[0].begin(), csv[0].end(), ','));
  // The page has all of it in memory, and says what the files lack.
  const auto page = test::page_data(folder.string());
  EXPECT_EQ(test::page_curve(page, "loss").size(),
            static_cast<std::size_t>(kBefore + kDuring + kAfter));
  EXPECT_THAT(page["failures"].get<std::string>(), HasSubstr("metrics.jsonl"));
}

TEST(FullDisk, AFolderThatWentAwayDoesNotEndATraining) {
  const test::TemporaryFolder folder;
  testing::internal::CaptureStderr();
  {
    observe::Run run((folder / "run").string(), {.renew_seconds = 0});
    run.step({{"loss", 1}});
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::filesystem::remove_all(folder / "run");
    run.step({{"loss", 1}, {"new", 2}});
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("report.html"));
}

}  // namespace
}  // namespace cairn::observe
