// dcgan, run as a user runs it: both networks learn at every level, a run that was cut goes on bit
// for bit, bad input ends with one clear line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

// One thread: beside other tests the networks' small operations would wait for each other.
const std::string kDcgan = "OMP_NUM_THREADS=1 " CAIRN_DCGAN_PROGRAM;

/// The values of each step that a run told, without its times and memory.
std::vector<nlohmann::json> steps_of(const std::filesystem::path& run) {
  std::vector<nlohmann::json> steps;
  std::istringstream file(read_text(run / "metrics.jsonl"));
  for (std::string text; std::getline(file, text);) {
    const nlohmann::json line = nlohmann::json::parse(text);
    if (line.contains("event") || !line.contains("step")) continue;
    nlohmann::json& step = steps.emplace_back();
    for (const auto& [name, value] : line.items()) {
      const bool is_timed =
          name == "time" || name == "images_per_second" || name == "machine_share";
      if (!is_timed && name.find('/') == std::string::npos) step[name] = value;
    }
  }
  return steps;
}

class DcganLevels : public testing::TestWithParam<const char*> {};

TEST_P(DcganLevels, BothNetworksLearn) {
  const TemporaryFolder folder;
  const ShellResult result =
      shell(kDcgan + " --steps 150 --report-every 10 --observe " + (folder / "run").string() +
            " --picture " + (folder / "samples.svg").string() + " " + GetParam());
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  double d_loss = 0, d_real = 0, d_fake = 0;  // means of the second half
  const auto lines = steps_of(folder / "run");
  ASSERT_EQ(lines.size(), 150u);
  for (std::size_t i = 50; i < 150; ++i) {
    d_loss += lines[i]["d_loss"].get<double>() / 100;
    d_real += lines[i]["d_real"].get<double>() / 100;
    d_fake += lines[i]["d_fake"].get<double>() / 100;
  }
  EXPECT_LT(d_loss, 1.2);  // 2 log 2 = 1.39 where it cannot tell them apart
  EXPECT_GT(d_real, d_fake + 0.2);
  EXPECT_GT(d_fake, 0.05);  // the generator is not beaten either
  EXPECT_GT(std::filesystem::file_size(folder / "samples.svg"), 5000u);
  std::ostringstream page;
  page << std::ifstream(folder / "run/report.html").rdbuf();
  EXPECT_THAT(page.str(), testing::HasSubstr("\"height\":224,\"name\":\"samples\""));
}

INSTANTIATE_TEST_SUITE_P(All, DcganLevels,
                         testing::Values("--opt-level O0", "--opt-level O1", "--opt-level O2",
                                         "--opt-level O2 --half-dtype bf16"));

TEST(Dcgan, ACutRunContinuesBitForBit) {
  const TemporaryFolder folder;
  const auto run = [&](const std::string& arguments) {
    const ShellResult result = shell(kDcgan + " --opt-level O2 --report-every 5 " + arguments);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    return result.out;
  };
  const auto metrics = [&](const char* name) {
    nlohmann::json last = steps_of(folder / name).back();
    last.erase("skipped");  // of each run
    return last;
  };
  run("--steps 15 --observe " + (folder / "whole").string());
  const std::string checkpoints = " --checkpoint-dir " + (folder / "c").string();
  run("--steps 10" + checkpoints);
  const std::string out =
      run("--steps 15 --observe " + (folder / "resumed").string() + checkpoints);
  EXPECT_THAT(out, HasSubstr("resumed at step 10"));
  EXPECT_EQ(metrics("whole"), metrics("resumed"));
}

TEST(Dcgan, TwoProcessesDivideItsStatesWithTheSameBits) {
  const TemporaryFolder folder;
  const auto losses = [&](const std::string& stage) {
    const std::string metrics = folder / ("of" + stage);
    const ShellResult result = shell(
        "OMP_NUM_THREADS=1 " CAIRN_RUN_PROGRAM " --nproc-per-node 2 " CAIRN_DCGAN_PROGRAM
        " --opt-level O2 --steps 6 --report-every 1 --batch-size 8 --histograms 3 --observe " +
        metrics + " --shard " + stage);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    for (const char* layer : {"d.0.weight", "g.0.weight"})
      EXPECT_THAT(read_text(metrics + "/report.html"), HasSubstr(layer));
    return steps_of(metrics);
  };
  const auto expected = losses("0");
  ASSERT_EQ(expected.size(), 6u);
  for (const char* stage : {"1", "2", "3"}) EXPECT_EQ(losses(stage), expected) << stage;
}

TEST(Dcgan, BadUsage) {
  EXPECT_EQ(shell(kDcgan + " --opt-level 02").status, 1);
  EXPECT_EQ(shell(kDcgan + " --batch-size 0").status, 2);
  EXPECT_EQ(shell(kDcgan + " --data /no/such/folder").status, 1);
  EXPECT_EQ(shell(kDcgan + " --batch-size 100000").status, 1);
}

}  // namespace
}  // namespace cairn::test
