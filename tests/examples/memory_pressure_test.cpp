// memory_pressure: plain training is refused, every other way fits and learns the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// Sixteen tiny trainings in processes of their own: one thread each, beside other tests.
const std::string kPressure = "OMP_NUM_THREADS=1 " CAIRN_MEMORY_PRESSURE_PROGRAM;

/// A line of a table.
struct Row {
  double loss = 0, differs = 0, seconds = 0;
  double device = 0, tensors = 0, accounted = 0, process = 0;  // MiB
};

std::map<std::string, Row> rows_of(const std::string& table) {
  std::map<std::string, Row> rows;
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, unit;
    words >> name;
    if (name == "plain,") words >> unit >> unit;  // "plain, no limit"
    Row row;
    words >> row.loss >> row.differs >> row.seconds;
    for (double* bytes : {&row.device, &row.tensors, &row.accounted, &row.process}) {
      words >> *bytes >> unit;
    }
    if (words && unit == "MiB") rows[name] = row;
  }
  return rows;
}

TEST(MemoryPressureExample, EveryWayButPlainFitsAndLearnsTheSame) {
  const TemporaryFolder folder;
  const std::string picture = (folder / "memory.svg").string();
  const ShellResult result =
      shell(kPressure + " --scale 0.05 --steps 2 --budget 1500M --picture " + picture +
            " --only accumulation,o2,recomputation,offload,fused,fused-recompute,balanced,"
            "ddp,zero,fsdp,sqrt-n,log-n,constant");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(read_text(picture), AllOf(StartsWith("<svg"), HasSubstr(">budget</text>")));

  const std::size_t second = result.out.find("a chain of");
  ASSERT_NE(second, std::string::npos) << result.out;
  const auto words = rows_of(result.out.substr(0, second)),
             chain = rows_of(result.out.substr(second));
  ASSERT_THAT(result.out.substr(0, second),
              HasSubstr("plain, within it:\n[allocate] expected at most"));
  for (const char* way : {"accumulation", "o2", "recomputation", "offload", "fused",
                          "fused-recompute", "balanced", "ddp", "zero", "fsdp"}) {
    ASSERT_TRUE(words.contains(way)) << way << "\n" << result.out;
    const Row& row = words.at(way);
    EXPECT_LT(row.device, 75.0) << way;
    EXPECT_LE(row.differs, way == std::string("o2") ? 1e-3 : 1e-6) << way;
  }
  EXPECT_GT(words.at("plain,").device, 75.0);
  EXPECT_LT(words.at("zero").tensors, words.at("ddp").tensors);
  EXPECT_LT(words.at("fsdp").tensors, words.at("zero").tensors);
  // The whole of it is seen by the operating system, and little else.
  EXPECT_NEAR(words.at("plain,").process, words.at("plain,").accounted, 12.0);
  for (const char* way : {"sqrt-n", "log-n", "constant"}) {
    ASSERT_TRUE(chain.contains(way)) << way << "\n" << result.out;
    EXPECT_LT(chain.at(way).device, 0.25 * chain.at("plain").device) << way;
    EXPECT_EQ(chain.at(way).differs, 0.0) << way;
  }
}

// Measuring what is planned takes longest: of fewer words.
TEST(MemoryPressureExample, PlannedWaysFit) {
  const ShellResult result =
      shell(kPressure + " --scale 0.01 --steps 2 --budget 2000M --only planned");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const std::size_t second = result.out.find("a chain of");
  ASSERT_NE(second, std::string::npos) << result.out;
  for (const std::string& table : {result.out.substr(0, second), result.out.substr(second)}) {
    const auto rows = rows_of(table);
    ASSERT_TRUE(rows.contains("planned")) << result.out;
    EXPECT_LT(rows.at("planned").device, 20.0);
    EXPECT_LE(rows.at("planned").differs, 1e-3);
  }
}

TEST(MemoryPressureExample, BadUsageEndsWithOneLine) {
  for (const char* arguments : {"--scale 2", "--budget much", "--no-such-flag"}) {
    const ShellResult result = shell(kPressure + " " + arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  const ShellResult unknown = shell(kPressure + " --only magic");
  EXPECT_EQ(unknown.status, 1);
  EXPECT_THAT(unknown.err, HasSubstr("expected the name of a way, got 'magic'"));
  EXPECT_THAT(shell(kPressure + " --help").out, HasSubstr("--budget"));
}

}  // namespace
}  // namespace cairn::test
