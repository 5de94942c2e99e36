// scripts/four_ranks: the page of a job with a slow rank, overflows, a kill and a resume has each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "observe/run_files.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::vector<json> told_events(const json& page, const std::string& kind) {
  std::vector<json> found;
  for (const json& event : page["events"]) {
    if (event[2] == kind) found.push_back(event);
  }
  return found;
}

TEST(FourRanks, ThePageShowsWhatWentWrong) {
  const TemporaryFolder folder;
  const std::string bin = std::filesystem::path(CAIRN_DIGITS_PROGRAM).parent_path().string();
  const ShellResult job = shell(test_folder() + "/../scripts/four_ranks --bin " + bin + " " +
                                (folder / "run").string());
  ASSERT_EQ(job.status, 0) << job.out << job.err;
  const json page = page_data(folder / "run");

  const json loss = page_curve(page, "loss");
  ASSERT_EQ(loss.size(), 80u);
  for (std::size_t i = 0; i < 80; ++i) EXPECT_EQ(loss[i][0], i + 1);

  EXPECT_EQ(page["slowest"], 2) << page["side_by_side"];
  ASSERT_EQ(page["side_by_side"].size(), 4u);
  for (const json& rank : page["side_by_side"]) {
    EXPECT_EQ(rank["step"], 80) << rank;
    EXPECT_EQ(rank["running"], false) << rank;
    EXPECT_GT(rank["memory"], 1 << 20) << rank;
    EXPECT_GE(rank["wait"], page["side_by_side"][2]["wait"]) << rank;
  }
  EXPECT_THAT(page["advice"].dump(), HasSubstr("ranks: rank 2 ("));

  const auto skips = told_events(page, "skip");
  ASSERT_FALSE(skips.empty());
  EXPECT_NE(skips[0][4], "");  // the parameter
  EXPECT_NEAR(page_curve(page, "loss_scale")[0][1], 8388608, 10);

  const auto restarts = told_events(page, "restart");
  ASSERT_EQ(restarts.size(), 1u);
  EXPECT_EQ(restarts[0][1], 20);
  EXPECT_THAT(restarts[0][3].get<std::string>(), HasSubstr("steps are done anew"));
  EXPECT_EQ(told_events(page, "checkpoint").size(), 4u);
}

}  // namespace
}  // namespace cairn::test
