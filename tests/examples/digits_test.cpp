// digits, run as a user runs it: every opt level learns, killed runs continue bit for bit, bad
// input ends with one clear line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "observe/trace_files.h"
#include "support/free_port.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kDigits = CAIRN_DIGITS_PROGRAM;
const std::string kDigitsRun = CAIRN_RUN_PROGRAM;
const std::string kCkpt = CAIRN_CKPT_PROGRAM;

std::vector<nlohmann::json> metrics(const std::filesystem::path& path) {
  std::vector<nlohmann::json> lines;
  std::istringstream file(read_text(path));
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

double test_accuracy(const std::string& arguments) {
  const TemporaryFolder folder;
  const ShellResult result =
      shell(kDigits + " --observe " + (folder / "run").string() + " " + arguments);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  const auto lines = metrics(folder / "run/metrics.jsonl");
  return lines.empty() ? 0.0 : lines.back().value("test_accuracy", 0.0);
}

class DigitsLevels : public testing::TestWithParam<const char*> {};

TEST_P(DigitsLevels, ReadsDrawnDigits) {
  EXPECT_GE(test_accuracy(std::string("--epochs 2 ") + GetParam()), 0.99);
}

INSTANTIATE_TEST_SUITE_P(
    All, DigitsLevels,
    testing::Values("--opt-level O0", "--opt-level O1 --half-dtype f16",
                    "--opt-level O1 --half-dtype bf16", "--opt-level O2 --half-dtype f16",
                    "--opt-level O2 --half-dtype bf16",
                    "--opt-level O3 --keep-batchnorm-fp32 true --half-dtype f16",
                    "--opt-level O3 --keep-batchnorm-fp32 true --half-dtype bf16"));

class DigitsMnist : public testing::TestWithParam<const char*> {};

TEST_P(DigitsMnist, ReadsRealDigits) {
  const char* set = std::getenv("CAIRN_TEST_DATA");
  const auto folder =
      std::filesystem::path(set != nullptr ? set : CAIRN_TEST_DATA_DEFAULT) / "mnist";
  if (!std::filesystem::exists(folder)) {
    std::cout << "no MNIST at " << folder << ": not run\n";
    return;
  }
  EXPECT_GE(test_accuracy("--data " + folder.string() + " --epochs 6 --opt-level " + GetParam()),
            0.975);
}
INSTANTIATE_TEST_SUITE_P(All, DigitsMnist, testing::Values("O0", "O2"));

TEST(Digits, TwoKilledProcessesResumeBitForBit) {
  const TemporaryFolder folder;
  const std::string job =
      kDigitsRun + " --nproc-per-node 2 " + kDigits +
      " --train-size 2000 --test-size 500 --accumulate 2 --steps 24 --save-every 4";
  const std::string whole = (folder / "whole").string(), broken = (folder / "broken").string();
  const ShellResult unbroken = shell(job + " --checkpoint-dir " + whole);
  ASSERT_EQ(unbroken.status, 0) << unbroken.out << unbroken.err;

  // Ends one rank with SIGKILL once step 12 is on disk; the launcher passes the signal on as 128
  // + 9.
  const ShellResult killed = shell(
      job + " --checkpoint-dir " + broken + " & launcher=$!; until [ -e " + broken +
      "/step-00000012 ]; do kill -0 $launcher || break; sleep 0.02; done; "
      "kill -KILL $(awk '{print $2}' /proc/$launcher/task/$launcher/children); wait $launcher");
  EXPECT_EQ(killed.status, 137) << killed.out << killed.err;
  EXPECT_FALSE(std::filesystem::exists(folder / "broken/step-00000024"));

  const ShellResult resumed = shell(job + " --checkpoint-dir " + broken);
  ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step"));
  const ShellResult diff =
      shell(kCkpt + " diff " + whole + "/step-00000024 " + broken + "/step-00000024");
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
}

// A job of sharded processes goes on at another stage, and as one whose processes have everything,
// with the same bits.
TEST(Digits, AShardedJobGoesOnUnsharded) {
  const TemporaryFolder folder;
  const std::string job = kDigitsRun + " --nproc-per-node 2 " + kDigits +
                          " --train-size 2000 --test-size 500 --schedule constant "
                          "--save-every 1000 --checkpoint-dir ";
  const std::string plain = (folder / "plain").string(), sharded = (folder / "sharded").string();
  const std::pair<int, std::string> runs[] = {{0, plain + " --steps 12"},
                                              {1, sharded + " --shard 1 --steps 4"},
                                              {2, sharded + " --shard 2 --steps 7"},
                                              {3, sharded + " --shard 3 --steps 10"},
                                              {0, sharded + " --steps 12"}};
  for (const auto& [stage, arguments] : runs) {
    const ShellResult result = shell(job + arguments);
    ASSERT_EQ(result.status, 0) << arguments << result.out << result.err;
    const std::string said = core::str("ZeRO stage ", stage);
    EXPECT_EQ(result.out.find(said) != std::string::npos, stage > 0) << result.out;
  }
  const auto bytes = [&](const char* file) {
    return std::filesystem::file_size(folder / "sharded/step-00000007" / file);
  };
  EXPECT_GT(bytes("rank-0.safetensors"), 10 * bytes("state.safetensors"));  // its shards
  const ShellResult diff =
      shell(kCkpt + " diff " + plain + "/step-00000012 " + sharded + "/step-00000012");
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
}

// Two copies of two parts: the second one's processes save no shards, and it learns the same.
TEST(Digits, AJobShardedWithinPairsLearnsTheSame) {
  const TemporaryFolder folder;
  const std::string job = kDigitsRun + " --nproc-per-node 4 " + kDigits +
                          " --train-size 2000 --test-size 500 --steps 3 --save-every 1000"
                          " --checkpoint-dir ";
  const std::string plain = (folder / "plain").string(), pairs = (folder / "pairs").string();
  ASSERT_EQ(shell(job + plain).status, 0);
  const ShellResult result = shell(job + pairs + " --shard 2 --shard-within 2");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("ZeRO stage 2 within 2"));
  const auto bytes = [&](const char* file) {
    return std::filesystem::file_size(folder / "pairs/step-00000003" / file);
  };
  EXPECT_GT(bytes("rank-1.safetensors"), 10 * bytes("rank-2.safetensors"));
  const ShellResult diff =
      shell(kCkpt + " diff " + plain + "/step-00000003 " + pairs + "/step-00000003");
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
  for (const auto& [flags, what] :
       {std::pair("--shard 2 --shard-within 3", "to divide the number of ranks, 4, got 3"),
        std::pair("--shard-within 2", "expected --shard-within 2 with --shard 1, 2 or 3")}) {
    const ShellResult refused = shell(job + pairs + " --resume never " + flags);
    EXPECT_EQ(refused.status, 1) << flags;
    EXPECT_THAT(refused.out + refused.err, HasSubstr(what));
  }
}

/// Both parts of a run of 40 steps told each step once, with its parts, and where it went on.
void expect_told_whole(const std::filesystem::path& run) {
  std::int64_t steps = 0, restarts = 0, checkpoints = 0;
  for (const nlohmann::json& line : metrics(run / "metrics.jsonl")) {
    restarts += line.value("event", "") == "restart";
    checkpoints += line.value("event", "") == "checkpoint";
    if (line.contains("event") || !line.contains("step")) continue;
    EXPECT_EQ(line["step"], ++steps);
    for (const char* value :
         {"loss", "accuracy", "lr", "loss_scale", "gradient_norm", "images_per_second",
          "seconds/forward", "seconds/backward", "seconds/update", "seconds/step"})
      EXPECT_TRUE(line.contains(value)) << value << " of " << line;
  }
  EXPECT_EQ(steps, 40);
  EXPECT_EQ(restarts, 1);
  EXPECT_EQ(checkpoints, 1);
  EXPECT_THAT(read_text(run / "report.html"), HasSubstr("\"running\":false"));
}

// What a cluster does before it takes a machine away; saved is the very step, which no other save
// would have had.
TEST(Digits, ATerminatedJobSavesAndResumesBitForBit) {
  for (const std::string& launcher : {std::string(), kDigitsRun + " --nproc-per-node 2 "}) {
    const TemporaryFolder folder;
    const std::string whole = (folder / "whole").string(), broken = (folder / "broken").string();
    const std::string seen = (folder / "seen").string();
    const std::string job = launcher + kDigits +
                            " --train-size 1000 --test-size 250 --batch-size 25 --steps 40 "
                            "--save-every 1000";
    const ShellResult unbroken = shell(job + " --checkpoint-dir " + whole);
    ASSERT_EQ(unbroken.status, 0) << unbroken.out << unbroken.err;
    const ShellResult ended = shell(job + " --observe " + seen + " --checkpoint-dir " + broken +
                                    " & job=$!; until [ \"$(cat " + seen +
                                    "/metrics.jsonl 2>/dev/null | wc -l)\" -ge 5 ]; do kill -0 "
                                    "$job || break; sleep 0.01; done; "
                                    "kill -TERM $job; wait $job");
    EXPECT_EQ(ended.status, 75) << ended.out << ended.err;
    EXPECT_THAT(ended.out + ended.err, HasSubstr("a signal has come"));
    EXPECT_FALSE(std::filesystem::exists(folder / "broken/step-00000040"));
    const ShellResult resumed = shell(job + " --observe " + seen + " --checkpoint-dir " + broken);
    ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
    EXPECT_THAT(resumed.out, HasSubstr("resumed at step"));
    expect_told_whole(seen);
    const ShellResult diff =
        shell(kCkpt + " diff " + whole + "/step-00000040 " + broken + "/step-00000040");
    EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
  }
}

TEST(Digits, ADamagedCheckpointFallsBackToTheOneBefore) {
  const TemporaryFolder folder;
  const std::string dir = (folder / "run").string();
  const std::string job =
      kDigits + " --train-size 1000 --test-size 500 --save-every 4 --checkpoint-dir " + dir;
  ASSERT_EQ(shell(job + " --steps 8").status, 0);
  ASSERT_EQ(shell("f=$(ls " + dir +
                  "/step-00000008/*.safetensors | head -n 1); printf 'x' | dd of=$f bs=1 "
                  "seek=$(($(stat -c %s $f) - 9)) conv=notrunc")
                .status,
            0);
  const ShellResult verified = shell(kCkpt + " verify " + dir + "/step-00000008");
  EXPECT_EQ(verified.status, 1) << verified.out;
  const ShellResult resumed = shell(job + " --steps 12");
  ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_THAT(resumed.err, HasSubstr("step-00000008"));
}

TEST(Digits, BadUsageEndsWithStatus2AndOneLine) {
  for (const char* arguments : {"--opt-level O9", "--batch-size 0", "--no-such-flag", "--lr -1",
                                "--lr inf", "--lr nan", "--epochs x", "--profile 2:3",
                                "--observe /tmp/x --profile 3:2", "--observe /tmp/x --profile 3"}) {
    const ShellResult result = shell(kDigits + " " + arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  EXPECT_EQ(shell(kDigits + " --help").status, 0);
}

TEST(Digits, ProcessesProfileTheSameSteps) {
  const TemporaryFolder folder;
  const ShellResult result =
      shell(kDigitsRun + " --nproc-per-node 2 " + kDigits +
            " --steps 6 --batch-size 8 --profile 3:5 --observe " + (folder / "run").string());
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  for (const char* rank : {"run", "run/rank-1"}) {
    const auto trace = nlohmann::json::parse(read_text(folder / rank / "trace.json"));
    std::map<std::string, int> count;
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] == "X") ++count[event["name"]];
    }
    for (const char* once : {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"})
      EXPECT_EQ(count[once], 1) << once;
    EXPECT_EQ(count["FusedAdam"], 3);
    EXPECT_EQ(count["forward"], 3);
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "run/trace.perfetto-trace"));
}

// By pandas: a step's operations lie in it, on each rank.
TEST(Digits, HolisticTraceAnalysisReadsTheTraces) {
  if (!hta_is_here()) GTEST_SKIP() << "no build/readers/hta: run scripts/install_dependencies";
  const TemporaryFolder folder;
  const std::string run = (folder / "run").string();
  const ShellResult result = shell(kDigitsRun + " --nproc-per-node 2 " + kDigits +
                                   " --steps 6 --batch-size 8 --profile 3:5 --observe " + run);
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const nlohmann::json ranks = hta_reading(run + "/trace.json " + run + "/rank-1/trace.json");
  ASSERT_EQ(ranks.size(), 2u);
  for (const auto& [rank, operations] : ranks.items()) {
    std::map<std::string, std::multiset<int>> steps;
    for (const auto& [name, kind, step] :
         operations.get<std::vector<std::tuple<std::string, std::string, int>>>())
      steps[kind + " " + name].insert(step);
    for (const char* once : {"user_annotation forward", "cpu_op FusedAdam"})
      EXPECT_EQ(steps[once], (std::multiset{3, 4, 5})) << rank << ": " << once;
    EXPECT_EQ(steps["user_annotation ProfilerStep#4"], std::multiset{4}) << rank;
    EXPECT_GE(steps["cpu_op conv2d"].count(4), 2u) << rank;
  }
}

TEST(Digits, ProcessesDrawHistogramsOfWeightsAndGradients) {
  for (const char* shard : {"0", "3"}) {
    const TemporaryFolder folder;
    const ShellResult result =
        shell(kDigitsRun + " --nproc-per-node 2 " + kDigits +
              " --steps 4 --batch-size 8 --accumulate 2 --histograms 2 " + "--shard " + shard +
              " --observe " + (folder / "run").string());
    ASSERT_EQ(result.status, 0) << result.out << result.err;
    for (const char* rank : {"run", "run/rank-1"}) {
      EXPECT_THAT(read_text(folder / rank / "report.html"), HasSubstr("\"layers\":[{\"bits\":"))
          << rank << " with --shard " << shard;
    }
  }
}

/// The scale is beyond what f16 holds: the first backward overflows.
TEST(Digits, ThePageExplainsPrecisionAndTheFirstAnomaly) {
  const TemporaryFolder folder;
  const ShellResult result =
      shell(kDigits +
            " --train-size 300 --steps 5 --loss-scale 16777216 --explain --detect-anomaly "
            "--observe " +
            (folder / "run").string());
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr(": the backward of cast after 7 made "));
  const nlohmann::json texts = page_data(folder / "run")["texts"];
  ASSERT_EQ(texts.size(), 2u) << texts;
  EXPECT_EQ(texts[0]["name"], "Precision of operations");
  EXPECT_EQ(texts[0]["step"], 3);
  EXPECT_THAT(texts[0]["text"].get<std::string>(),
              HasSubstr("conv2d         forward       2  f16"));
  EXPECT_EQ(texts[1]["name"], "First result that is not finite");
  EXPECT_THAT(texts[1]["text"].get<std::string>(), HasSubstr("the backward of cast after 7 made "));
}

TEST(Digits, SaysWhatWasExpectedInPlaceOfAFlag) {
  const auto told = [](const std::string& arguments) {
    return shell(kDigits + " " + arguments).err;
  };
  EXPECT_EQ(told("--lr -1"),
            "digits: --lr: expected a number above 0, got '-1' (see digits --help)\n");
  EXPECT_EQ(told("--opt-levle O2"),
            "digits: unknown flag '--opt-levle': did you mean --opt-level? (see digits --help)\n");
}

TEST(Digits, BadInputEndsWithStatus1AndNamesIt) {
  const TemporaryFolder folder;
  const auto fails_with = [](const std::string& arguments, const std::string& text) {
    const ShellResult result = shell(kDigits + " " + arguments);
    EXPECT_EQ(result.status, 1) << arguments;
    EXPECT_THAT(result.err, HasSubstr(text)) << arguments;
  };
  fails_with("--device tpu", "tpu");
  fails_with("--data " + folder.string(), folder.string());
  fails_with("--train-size 10", "batch");
  fails_with("--resume " + (folder / "none").string(), "none");
  std::ofstream(folder / "file") << "x";
  fails_with("--steps 1 --observe " + (folder / "file/run").string(), "file/run");
}

TEST(Digits, KeepBatchnormTakesNoValueToo) {
  EXPECT_EQ(shell(kDigits + " --opt-level O3 --steps 1 --keep-batchnorm-fp32").status, 0);
  EXPECT_EQ(shell(kDigits + " --opt-level O2 --steps 1 --keep-batchnorm-fp32 false").status, 0);
  const ShellResult wrong = shell(kDigits + " --keep-batchnorm-fp32 maybe");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.err, testing::AllOf(HasSubstr("true"), HasSubstr("false"), HasSubstr("maybe")));
}

// Rank 1 is stopped for half of the time, and rank 0 waits.
TEST(Digits, ALineForEachRankWhereTheyDiffer) {
  const std::string slow =
      "'if [ $RANK = 1 ]; then (while kill -STOP $$; do sleep 0.05; kill -CONT $$; sleep 0.05; "
      "done) 2>/dev/null & fi; exec \"$@\"' -- ";
  const ShellResult result = shell(kDigitsRun + " --nproc-per-node 2 -- sh -c " + slow + kDigits +
                                   " --train-size 2000 --test-size 500 --steps 60");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const auto waited = [&](const char* rank) {
    std::smatch found;
    const std::regex line(core::str("rank ", rank, " +waited ([0-9]+) % of the time for others"));
    return std::regex_search(result.out, found, line) ? std::stoi(found[1]) : -1;
  };
  EXPECT_GT(waited("0"), waited("1") + 5) << result.out;
  EXPECT_GE(waited("1"), 0) << result.out;
}

// Two processes by hand: cairn-run may end the other one before it can say so.
TEST(Digits, AnErrorOfOneRankIsToldByTheOther) {
  const std::string port = std::to_string(free_port());
  const ShellResult result =
      shell("export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port + "\nRANK=1 " +
            kDigits + " --data /nowhere 2>/dev/null &\nRANK=0 " + kDigits + " --steps 1000000");
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(result.err,
              testing::ContainsRegex("digits: .*rank 1 .pid [0-9]+ on .*. threw: "
                                     "\\[read_image_folder\\] expected a folder, got '/nowhere'"));
}

}  // namespace
}  // namespace cairn::test
