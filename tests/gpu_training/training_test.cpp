// The example programs on simulated GPUs: their losses are the CPU's within rounding, in every
// schedule, and what goes wrong is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <sstream>

#include "observe/run_files.h"
#include "support/tensors.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::string kDigits = std::string(CAIRN_DIGITS_PROGRAM) + " --train-size 200 --test-size 16 ";
const std::string kSmall = " --batch-size 8 ";
const std::string kTwo = std::string(CAIRN_RUN_PROGRAM) + " --nproc-per-node 2 ";

/// Runs a program and gives each step's loss, or another of its metrics.
std::vector<double> losses(const std::string& command, const std::string& key = "loss") {
  const TemporaryFolder folder;
  const ShellResult result = shell(command + " --observe " + (folder / "run").string());
  EXPECT_EQ(result.status, 0) << command << "\n" << result.out << result.err;
  std::vector<double> all;
  std::istringstream file(read_text(folder / "run/metrics.jsonl"));
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains(key) && json.contains("step")) all.push_back(json[key]);
  }
  return all;
}

void expect_same_losses(const std::vector<double>& got, const std::vector<double>& expected,
                        double relative) {
  ASSERT_GT(got.size(), 2u);
  for (const double loss : expected) ASSERT_TRUE(std::isfinite(loss));
  expect_close(got, expected, relative, relative);
}

/// An environment before the command.
std::string with(const std::string& schedule, int gpus = 2) {
  return "CAIRN_SIM_GPUS=" + std::to_string(gpus) + " CAIRN_SIM_SCHEDULE=" + schedule + " ";
}

struct Level {
  const char* name;
  const char* arguments;
  double relative;
};
void PrintTo(const Level& level, std::ostream* out) {
  *out << level.name;
}

class Levels : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(
    All, Levels,
    testing::Values(Level{"O0", "--opt-level O0", 1e-4}, Level{"O1", "--opt-level O1", 2e-2},
                    Level{"O1_bf16", "--opt-level O1 --half-dtype bf16", 6e-2},
                    Level{"O2", "--opt-level O2", 2e-2},
                    Level{"O3_bf16", "--opt-level O3 --half-dtype bf16", 6e-2}),
    [](const auto& info) { return info.param.name; });

TEST_P(Levels, OfDigitsTrainAsOnTheCpu) {
  const std::string run = kDigits + kSmall + GetParam().arguments + " --steps 5";
  const auto expected = losses(run);
  std::vector<double> first;
  for (const char* schedule : {"late", "early", "shuffled"}) {
    const auto got = losses(with(schedule) + run + " --device cuda");
    expect_same_losses(got, expected, GetParam().relative);
    if (first.empty()) first = got;
    EXPECT_EQ(got, first) << schedule << ": a schedule changed the bits";
  }
}

TEST_P(Levels, OfDigitsTrainAsOnTheCpuInTwoProcesses) {
  const std::string run =
      kTwo + kDigits + kSmall + GetParam().arguments + " --steps 4 --accumulate 2";
  const auto expected = losses(run);
  expect_same_losses(losses(with("late") + run + " --device cuda"), expected, GetParam().relative);
}

// As a user starts it: ranks on GPUs of their own adopt each other's choices of algorithms, first
// while both are timing, then all of them. Only the test's 250 images make a product worth timing.
TEST(Training, TwoProcessesShareTheirChoicesOfAlgorithms) {
  const TemporaryFolder folder;
  const std::string run = "CAIRN_PRODUCTS=time CAIRN_CACHE=" + (folder / "cache").string() + " " +
                          with("late") + kTwo + CAIRN_DIGITS_PROGRAM +
                          " --train-size 200 --test-size 250" + kSmall +
                          "--opt-level O2 --device cuda --steps 3";
  const auto first = losses(run);
  EXPECT_EQ(first.size(), 3u);
  EXPECT_THAT(read_text(folder / "cache/cublaslt_products.json"), HasSubstr("simulated GPU"));
  EXPECT_EQ(losses(run), first);
}

TEST(Training, ShardedHasTheBitsOfDistributedDataParallel) {
  for (const char* schedule : {"late", "early", "shuffled"}) {
    const std::string run = with(schedule) + kTwo + kDigits + kSmall +
                            "--opt-level O2 --device cuda --steps 4 --accumulate 2";
    const auto expected = losses(run);
    EXPECT_EQ(expected.size(), 4u);
    EXPECT_EQ(losses(run + " --shard 1"), expected) << schedule;
  }
}

/// A small char_lm, and the text that it learns.
std::string language_model(const TemporaryFolder& folder) {
  std::ofstream text(folder / "text");
  for (int i = 0; i < 30; ++i) text << "A gradient is added to the sums of its window. ";
  return std::string(CAIRN_CHAR_LM_PROGRAM) + " --text " + (folder / "text").string() +
         " --opt-level O2 --half-dtype bf16 --steps 3 --layers 2 --width 32 --heads 2 --tokens 16 "
         "--batch-size 2 --sample 0 ";
}

// As a user starts it; the schedule is drawn anew each time.
TEST(Training, ALanguageModelInTwoProcessesHasTheSameBitsAtEveryStage) {
  const TemporaryFolder folder;
  const char* const schedules[] = {"late", "early", "shuffled"};
  const std::string schedule = schedules[std::random_device()() % 3];
  SCOPED_TRACE(schedule);
  const std::string model = kTwo + language_model(folder);
  const std::string run = with(schedule) + model + "--device cuda";
  const auto expected = losses(run);
  expect_same_losses(expected, losses(model), 6e-2);
  for (const char* stage : {" --shard 2", " --shard 3"})
    EXPECT_EQ(losses(run + stage), expected) << stage;
}

TEST(Training, OfTheOtherExamples) {
  const TemporaryFolder folder;
  const std::string language = language_model(folder);
  expect_same_losses(losses(with("late") + language + "--device cuda"), losses(language), 6e-2);
  const std::string images =
      std::string(CAIRN_DCGAN_PROGRAM) +
      " --opt-level O2 --half-dtype bf16 --steps 3 --report-every 1 "
      "--batch-size 4 --nz 8 --ngf 4 --ndf 4 --train-size 64 --test-size 16 ";
  for (const char* loss : {"d_loss", "g_loss"}) {
    expect_same_losses(losses(with("late") + images + "--device cuda", loss), losses(images, loss),
                       6e-2);
  }
}

/// gpt2 on a tiny model, first of random weights, and the text of language_model().
class Gpt2OnGpus : public testing::Test {
 protected:
  void SetUp() override {
    (void)language_model(folder_);
    const ShellResult made =
        shell(std::string(CAIRN_GPT2_PROGRAM) +
              " --layers 2 --heads 2 --width 32 --positions 32 --words 300 --write-random " +
              path("random"));
    ASSERT_EQ(made.status, 0) << made.err;
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string run(const std::string& arguments, const std::string& model = "random") const {
    return std::string(CAIRN_GPT2_PROGRAM) + " --model " + path(model) + " --text " + path("text") +
           " --tokens 16 --lr 3e-3 " + arguments;
  }
  /// What it prints after "loss ".
  static std::vector<double> losses(const std::string& command) {
    const ShellResult result = shell(command);
    EXPECT_EQ(result.status, 0) << command << "\n" << result.out << result.err;
    std::vector<double> all;
    const std::regex loss("loss ([.0-9]+)");
    for (std::sregex_iterator it(result.out.begin(), result.out.end(), loss), end; it != end; ++it)
      all.push_back(std::stod((*it)[1]));
    return all;
  }

  const TemporaryFolder folder_;
};

TEST_F(Gpt2OnGpus, LearnsAsOnTheCpu) {
  for (const auto& [level, relative] :
       {std::pair("--steps 3 --opt-level O0", 1e-3),
        std::pair("--steps 3 --opt-level O2 --micro-batches 2", 2e-2)}) {
    const auto expected = losses(run(level));
    const auto got = losses(with("shuffled") + run(level) + " --device cuda --export " +
                            path("tuned") + " --logits " + path("logits"));
    expect_same_losses(got, expected, relative);
    EXPECT_LT(losses(run("--steps 1 --opt-level O0", "tuned")).front(), got.front() - 0.05);
  }
}

TEST_F(Gpt2OnGpus, ExportsTheBitsThatItRead) {
  const auto exported = [&](const std::string& arguments) {
    const ShellResult result = shell(run("--steps 0 --export " + path("out") + arguments));
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    return read_text(path("out") + "/model.safetensors");
  };
  EXPECT_TRUE(exported(" --device cuda") == exported(""));
}

// Whatever processes divide.
TEST_F(Gpt2OnGpus, HasTheSameBitsInTwoProcessesAtEveryStage) {
  const auto in_two = [&](const std::string& how) {
    return losses(with("late") + kTwo + run("--steps 3 --device cuda " + how));
  };
  const auto expected = in_two("");
  EXPECT_EQ(expected.size(), 3u);
  for (const char* stage : {"--shard 2", "--shard 3 --recompute"})
    EXPECT_EQ(in_two(stage), expected) << stage;
}

// The budget is of the GPU's tensors, whatever the program takes beside them.
TEST_F(Gpt2OnGpus, FitsTheBudget) {
  const auto within = [&](const std::string& budget, int batch = 16) {
    return shell(with("late") + run("--steps 1 --device cuda --batch-size " +
                                    std::to_string(batch) + " --budget " + budget));
  };
  const ShellResult cut = within("1200K");
  EXPECT_EQ(cut.status, 0) << cut.out << cut.err;
  EXPECT_THAT(cut.out, AllOf(HasSubstr("every activation kept: does not fit"),
                             HasSubstr("of its GPU at most, of 1.2 MiB")));
  const ShellResult refused = within("300K");
  EXPECT_EQ(refused.status, 1) << refused.out;
  EXPECT_THAT(refused.err,
              AllOf(HasSubstr("cuda:0"), HasSubstr("fewer --tokens or a smaller --batch-size")));
  const ShellResult planned = within("8M --plan", 1);
  EXPECT_EQ(planned.status, 0) << planned.out << planned.err;
  EXPECT_THAT(planned.out, AllOf(HasSubstr("chosen, because"), HasSubstr("f32, on the host")));
}

TEST_F(Gpt2OnGpus, KeepsStatesOnTheHost) {
  const std::string here = run("--steps 3 --batch-size 1 --full-state --device cuda --budget 8M");
  const ShellResult there = shell(with("late") + here + " --offload host");
  EXPECT_EQ(there.status, 0) << there.out << there.err;
  EXPECT_THAT(there.out, HasSubstr("GPU 0.2 MiB"));  // 0.6 without
  EXPECT_EQ(losses(with("late") + here + " --offload host"), losses(with("late") + here));
}

/// The host queues what its GPU waits for and goes on: only the GPU's own time tells who is late.
TEST(Training, NamesTheSlowestRank) {
  const TemporaryFolder folder;
  const ShellResult result =
      shell(with("late") + kTwo + kDigits +
            " --device cuda --batch-size 1 --steps 8 --slow-rank 1 --observe " +
            (folder / "run").string());
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const nlohmann::json page = page_data(folder / "run");
  EXPECT_EQ(page["slowest"], 1);
  ASSERT_EQ(page["side_by_side"].size(), 2u);
  const double other = page["side_by_side"][0]["own"], slow = page["side_by_side"][1]["own"];
  EXPECT_GT(slow, 1.3 * other);
}

TEST(Training, WaitsForFewThingsAndMakesOneContext) {
  const auto counted = [](int steps) {
    const TemporaryFolder folder;
    const std::string file = (folder / "report").string();
    const ShellResult result =
        shell(with("late") + "CAIRN_SIM_REPORT=" + file + " " + kDigits + kSmall +
              "--opt-level O2 --device cuda:1 --steps " + std::to_string(steps));
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    return nlohmann::json::parse(read_text(file));
  };
  const auto few = counted(3), more = counted(9);
  EXPECT_EQ(few["contexts"], 1);
  const auto waits = [](const nlohmann::json& report) {
    double all = 0;
    for (const auto& [name, count] : report["waits"].items()) all += count.get<double>();
    return all;
  };
  // The step's verdict; and for the program's metrics the loss, and an accuracy's two.
  EXPECT_LE((waits(more) - waits(few)) / 6, 4.0) << few["waits"] << more["waits"];
}

TEST(Training, ResumesBitForBitAfterAKill) {
  const TemporaryFolder folder;
  const std::string whole = (folder / "whole").string(), broken = (folder / "broken").string();
  const std::string job = with("shuffled") + kTwo + kDigits + kSmall +
                          "--opt-level O2 --device cuda --steps 8 --save-every 2 "
                          "--checkpoint-dir ";
  ASSERT_EQ(shell(job + whole).status, 0);
  const ShellResult killed = shell(
      job + broken + " & launcher=$!; until [ -e " + broken +
      "/step-00000004 ]; do kill -0 $launcher || break; sleep 0.02; done; "
      "kill -KILL $(awk '{print $2}' /proc/$launcher/task/$launcher/children); wait $launcher");
  EXPECT_EQ(killed.status, 137) << killed.out << killed.err;
  const ShellResult resumed = shell(job + broken);
  ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step"));
  const ShellResult diff = shell(std::string(CAIRN_CKPT_PROGRAM) + " diff " + whole +
                                 "/step-00000008 " + broken + "/step-00000008");
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
}

// Code 6 is ncclRemoteError. The step in which it falls is not taken.
TEST(Training, AnErrorOfNcclIsNamedWithinTenSeconds) {
  const ShellResult result = shell(with("late") + "CAIRN_SIM_FAULTS=ncclAsyncError@12+=6 " + kTwo +
                                   kDigits + kSmall + "--device cuda --steps 400");
  EXPECT_NE(result.status, 0);
  EXPECT_LT(result.seconds, 10);
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank"), HasSubstr("failed on cuda:")));
}

TEST(Training, LackOfMemoryIsAnErrorThatSaysSo) {
  const ShellResult full = shell(with("late") + "CAIRN_SIM_MEMORY=1M " + kDigits +
                                 "--device cuda --steps 3 --batch-size 100");
  EXPECT_EQ(full.status, 1) << full.out << full.err;
  EXPECT_THAT(full.err, HasSubstr("cuda:0"));
  const ShellResult lost = shell(with("late") + "CAIRN_SIM_FAULTS=cudaStreamSynchronize@40+=700 " +
                                 kDigits + kSmall + "--device cuda --steps 30");
  EXPECT_EQ(lost.status, 1) << lost.out << lost.err;
  EXPECT_THAT(lost.err, HasSubstr("cudaErrorIllegalAddress"));
}

}  // namespace
}  // namespace cairn::test
