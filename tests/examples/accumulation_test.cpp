// accumulation: micro-batches give the gradients of the whole batch, in less memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>

#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kAccumulation = CAIRN_ACCUMULATION_PROGRAM;
const std::string kRun = CAIRN_RUN_PROGRAM;

std::string match(const std::string& text, const std::string& pattern, std::size_t group = 1) {
  std::smatch found;
  if (std::regex_search(text, found, std::regex(pattern))) return found[group];
  ADD_FAILURE() << "no " << pattern << " in\n" << text;
  return "0";
}

double difference(const std::string& out) {
  return std::stod(match(out, "gradients differ by at most ([-+.e0-9]+) of"));
}

ShellResult run(const std::string& command) {
  const ShellResult result = shell(command + " --batch-size 120");
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  return result;
}

TEST(AccumulationExample, InF32TheGradientsAgreeWithinRounding) {
  const ShellResult result = run(kAccumulation + " --opt-level O0 --micro-batches 5 --steps 12");
  EXPECT_THAT(result.out, HasSubstr("as 5 uneven micro-batches of 1 process(es)"));
  EXPECT_THAT(result.out, HasSubstr("step 12/12: loss"));
  EXPECT_LT(difference(result.out), 1e-5);
  EXPECT_GT(difference(result.out), 0.0);  // they were summed in another order
  const std::string memory = "activations: ([.0-9]+) ([KMG]iB) whole, ([.0-9]+) ([KMG]iB) in parts";
  ASSERT_EQ(match(result.out, memory, 2), match(result.out, memory, 4));
  EXPECT_LT(std::stod(match(result.out, memory, 3)) * 2, std::stod(match(result.out, memory, 1)));
}

TEST(AccumulationExample, EveryOptLevel) {
  for (const char* level : {"O1", "O2", "O3"}) {
    for (const char* half : {"f16", "bf16"}) {
      const ShellResult result =
          run(kAccumulation + " --steps 4 --opt-level " + level + " --half-dtype " + half);
      EXPECT_LT(difference(result.out), half[0] == 'f' ? 2e-2 : 1e-1) << level << half;
    }
  }
}

TEST(AccumulationExample, OverTwoProcesses) {
  const ShellResult result =
      run(kRun + " --nproc-per-node 2 " + kAccumulation + " --opt-level O0 --steps 6");
  EXPECT_THAT(result.out, HasSubstr("as 8 uneven micro-batches of 2 process(es)"));
  EXPECT_LT(difference(result.out), 1e-5);
}

TEST(AccumulationExample, BadUsageEndsWithOneLine) {
  for (const char* arguments : {"--micro-batches 0", "--opt-level O9", "--no-such-flag"}) {
    const ShellResult result = shell(kAccumulation + " " + arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  const ShellResult many = shell(kAccumulation + " --batch-size 10 --micro-batches 4");
  EXPECT_EQ(many.status, 1);
  EXPECT_THAT(many.err, HasSubstr("raise --batch-size"));
  EXPECT_THAT(shell(kAccumulation + " --help").out, HasSubstr("--micro-batches"));
}

}  // namespace
}  // namespace cairn::test
