// cairn-observe, as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kObserve = CAIRN_OBSERVE_PROGRAM;

TEST(CairnObserve, ComparesRuns) {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) observe::Run(folder / name).step({{"loss", 1}});
  const std::string runs = (folder / "a").string() + " " + (folder / "b").string();
  const std::string page = (folder / "report.html").string();
  const ShellResult result = shell(kObserve + " compare " + runs + " --out " + page);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "wrote " + page + "\n");
  EXPECT_EQ(page_data(folder.string())["runs"].size(), 2u);

  const ShellResult by_default =
      shell("cd " + folder.string() + " && " + kObserve + " compare a b");
  EXPECT_EQ(by_default.status, 0) << by_default.err;
  EXPECT_TRUE(std::filesystem::exists(folder / "compare.html"));
}

TEST(CairnObserve, SaysWhatIsWrong) {
  const TemporaryFolder folder;
  const auto fails = [](const std::string& arguments, int status, const std::string& word) {
    const ShellResult result = shell(kObserve + " " + arguments);
    EXPECT_EQ(result.status, status) << arguments;
    EXPECT_THAT(result.err, HasSubstr(word)) << arguments;
  };
  observe::Run(folder / "a").step({{"loss", 1}});
  const std::string a = (folder / "a").string();
  fails("", 2, "cairn-observe --help");
  fails("compare", 2, "RUN");
  fails("comapre " + a, 2, "did you mean compare?");
  fails("compare " + a, 1, "two runs or more");
  fails("compare " + a + " /nowhere", 1, "/nowhere/report.html, got none");
  fails("compare " + a + " " + a + " --out /nowhere/x", 1, "/nowhere/x");
}

}  // namespace
}  // namespace cairn::test
