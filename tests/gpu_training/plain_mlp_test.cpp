// plain_mlp and plain_mlp_cairn: a trainer with arrays, kernels, a stream and a communicator of its
// own, alone and with Cairn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <sstream>

#include "support/near.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kMlp = std::string(CAIRN_PLAIN_MLP_PROGRAM);
const std::string kMlpCairn = std::string(CAIRN_PLAIN_MLP_CAIRN_PROGRAM);
const std::string kTwoGpus = std::string(CAIRN_RUN_PROGRAM) + " --nproc-per-node 2 ";

/// Each rank's losses, one rank after another.
std::vector<double> losses_of_ranks(const std::string& command, const char* schedule = "late") {
  const ShellResult result =
      shell("CAIRN_SIM_GPUS=2 CAIRN_SIM_SCHEDULE=" + std::string(schedule) + " " + command);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  std::map<std::string, std::vector<double>> of_rank;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t rank = line.find("rank "), step = line.find(" step "),
                      loss = line.find(" loss ");
    if (step == std::string::npos || loss == std::string::npos) continue;
    of_rank[line.substr(rank + 5, step - rank - 5)].push_back(std::stod(line.substr(loss + 6)));
  }
  std::vector<double> all;
  for (const auto& [rank, losses] : of_rank) all.insert(all.end(), losses.begin(), losses.end());
  return all;
}

TEST(PlainMlp, LossesAreThoseOfTheProgramAlone) {
  const std::vector<double> alone = losses_of_ranks(kTwoGpus + kMlp + " --steps 10");
  ASSERT_EQ(alone.size(), 20u);
  for (const char* schedule : {"late", "early", "shuffled"}) {
    expect_near(losses_of_ranks(kTwoGpus + kMlpCairn + " --dtype f32 --steps 10", schedule), alone,
                2e-5);
  }
  expect_near(losses_of_ranks(kTwoGpus + kMlpCairn + " --steps 10"), alone, 3e-2);
}

TEST(PlainMlp, Learns) {
  const std::vector<double> losses = losses_of_ranks(kMlpCairn + " --steps 100");
  ASSERT_EQ(losses.size(), 100u);
  EXPECT_LT(std::accumulate(losses.end() - 20, losses.end(), 0.0) / 20, 1.7);  // 2.8 at first
}

TEST(PlainMlp, KilledAndResumedTheBitsAreThose) {
  const ShellResult result = shell("CAIRN_SIM_GPUS=2 " + std::string(CAIRN_CKPT_PROGRAM) +
                                   " prove-resume --kill-at 8 -- " + kTwoGpus + kMlpCairn +
                                   " --steps 16 --save-every 4 --checkpoint-dir {dir}");
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("resume: bit-exact"));
}

TEST(PlainMlp, TwoRanksStatesGoOnInOne) {
  const TemporaryFolder folder;
  const std::string dir = " --checkpoint-dir " + (folder / "states").string();
  losses_of_ranks(kTwoGpus + kMlpCairn + " --steps 10" + dir);
  EXPECT_EQ(losses_of_ranks(kMlpCairn + " --steps 14" + dir).size(), 4u);
}

TEST(PlainMlp, AWrongFlagIsToldByEveryRank) {
  const ShellResult result = shell("CAIRN_SIM_GPUS=2 " + kTwoGpus + kMlpCairn + " --dtype f64");
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.err, HasSubstr("expected --dtype f32 or bf16, got f64"));
}

}  // namespace
}  // namespace cairn::test
