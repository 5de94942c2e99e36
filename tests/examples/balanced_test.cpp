// balanced: the same losses, and memory that lies evenly on the devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <regex>

#include "cairn/core/error.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kBalanced = CAIRN_BALANCED_PROGRAM;

/// MiB of a device's row: gathered, balanced.
std::pair<double, double> peaks(const std::string& out, const std::string& device) {
  std::smatch found;
  const std::regex row(device + " +([.0-9]+) MiB +([.0-9]+) MiB");
  if (std::regex_search(out, found, row)) return {std::stod(found[1]), std::stod(found[2])};
  ADD_FAILURE() << "no row of " << device << " in\n" << out;
  return {0, 0};
}

TEST(BalancedExample, LossesAgreeAndTheFirstDevicesMemoryShrinks) {
  const std::string picture =
      std::filesystem::temp_directory_path() / core::str("balanced_", getpid(), ".svg");
  const ShellResult result =
      shell(kBalanced + " --devices 3 --batch-size 12 --length 12 --width 16 --steps 3 --picture " +
            picture);
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const std::regex step("loss ([.0-9]+) gathered, ([.0-9]+) balanced");
  std::vector<double> losses;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), step), end; it != end; ++it) {
    losses.push_back(std::stod((*it)[1]));
    EXPECT_NEAR(losses.back(), std::stod((*it)[2]), 1e-4);
  }
  ASSERT_EQ(losses.size(), 3u);
  EXPECT_NEAR(losses[0], std::log(40000.0), 0.5);
  EXPECT_LT(losses[2], losses[0]);
  // 144 words' logits are 22 MiB, a third of them on each device.
  const auto first = peaks(result.out, "cpu:0"), last = peaks(result.out, "cpu:2");
  EXPECT_GT(first.first, first.second + 22.0);
  EXPECT_NEAR(last.first, last.second, 9.0);
  std::ifstream file(picture);
  const std::string drawn(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(drawn, testing::StartsWith("<svg"));
  EXPECT_THAT(drawn, testing::HasSubstr(">cpu:2</text>"));
  std::filesystem::remove(picture);
}

TEST(BalancedExample, BadUsageEndsWithOneLine) {
  for (const char* arguments : {"--devices 0", "--device tpu", "--no-such-flag"}) {
    const ShellResult result = shell(kBalanced + " " + arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  EXPECT_THAT(shell(kBalanced + " --help").out, HasSubstr("--words"));
}

}  // namespace
}  // namespace cairn::test
