// gpt2: a tiny model in Hugging Face's layout is read, fine-tuned and written again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <regex>

#include "cairn/checkpointing/safetensors.h"
#include "observe/run_files.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using checkpointing::SafetensorsReader;
using testing::HasSubstr;

const std::string kGpt2 = "OMP_NUM_THREADS=1 " CAIRN_GPT2_PROGRAM;
const std::string kTwoGpt2 =
    "OMP_NUM_THREADS=1 " CAIRN_RUN_PROGRAM " --nproc-per-node 2 " CAIRN_GPT2_PROGRAM " ";

class Gpt2Example : public testing::Test {
 protected:
  void SetUp() override {
    const ShellResult made =
        run("--layers 2 --heads 2 --width 32 --positions 64 --words 300 --write-random " + random_);
    ASSERT_EQ(made.status, 0) << made.err;
    std::ofstream text(text_);
    for (int i = 0; i < 200; ++i) text << "the quick brown fox jumps over the lazy dog, ";
  }
  ShellResult run(const std::string& arguments) const { return shell(kGpt2 + " " + arguments); }
  std::string train(const std::string& arguments) const {
    return "--model " + random_ + " --text " + text_ + " --tokens 32 --batch-size 4 --lr 3e-3 " +
           arguments;
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  const TemporaryFolder folder_;
  const std::string random_ = path("random"), text_ = path("text.txt");
};

TEST_F(Gpt2Example, WritesWhatHuggingFaceWrites) {
  const SafetensorsReader file(random_ + "/model.safetensors");
  const std::pair<const char*, Shape> expected[] = {{"wte.weight", {300, 32}},
                                                    {"wpe.weight", {64, 32}},
                                                    {"h.0.ln_1.weight", {32}},
                                                    {"h.0.attn.bias", {1, 1, 64, 64}},
                                                    {"h.0.attn.c_attn.weight", {32, 96}},
                                                    {"h.1.attn.c_proj.bias", {32}},
                                                    {"h.1.mlp.c_fc.weight", {32, 128}},
                                                    {"h.1.mlp.c_proj.weight", {128, 32}},
                                                    {"ln_f.bias", {32}}};
  for (const auto& [name, shape] : expected) {
    ASSERT_NE(file.find(name), nullptr) << name;
    EXPECT_EQ(file.find(name)->shape, shape) << name;
  }
  EXPECT_EQ(file.entries().size(), 2u + 2 * 13 + 2);
}

TEST_F(Gpt2Example, WithoutStepsTheExportHasTheSameBits) {
  const ShellResult result = run(train("--steps 0 --export " + path("same")));
  ASSERT_EQ(result.status, 0) << result.err;
  const SafetensorsReader before(random_ + "/model.safetensors"),
      after(path("same") + "/model.safetensors");
  EXPECT_EQ(after.entries().size() + 2, before.entries().size());  // the masks
  for (const auto& entry : after.entries()) {
    EXPECT_EQ(after.read(entry).to_vector(), before.read(entry.name).to_vector()) << entry.name;
  }
}

TEST_F(Gpt2Example, TellsHowItGoes) {
  const ShellResult result = run(train("--steps 3 --budget 500M --observe " + path("run")));
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const auto steps = step_lines(path("run"));
  ASSERT_EQ(steps.size(), 3u);
  for (const nlohmann::json& step : steps) {
    for (const char* name : {"loss", "gradient_norm", "tokens_per_second", "machine_share",
                             "seconds/forward", "seconds/backward", "seconds/update"})
      EXPECT_TRUE(step.contains(name)) << name << " of " << step;
  }
  EXPECT_THAT(result.out, HasSubstr("step 3/3: loss " +
                                    std::to_string(steps[2]["loss"].get<double>()).substr(0, 5)));
}

TEST_F(Gpt2Example, LearnsAndIsReadByPyTorch) {
  for (const std::string level :
       {"--opt-level O0", "--opt-level O2", "--opt-level O2 --recompute"}) {
    const ShellResult result = run(train(level + " --steps 12 --budget 500M --export " +
                                         path("tuned") + " --logits " + path("logits")));
    ASSERT_EQ(result.status, 0) << result.out << result.err;
    std::vector<double> losses;
    const std::regex loss("loss ([.0-9]+)");
    for (std::sregex_iterator it(result.out.begin(), result.out.end(), loss), end; it != end;
         ++it) {
      losses.push_back(std::stod((*it)[1]));
    }
    ASSERT_EQ(losses.size(), 12u) << result.out;
    EXPECT_NEAR(losses.front(), std::log(300.0), 0.2) << level;
    EXPECT_LT(losses.back(), losses.front() - 1.0) << level;
    const char* python = std::getenv("CAIRN_TORCH_PYTHON");
    if (python == nullptr) continue;
    const ShellResult theirs = shell(std::string(python) + " -B " CAIRN_GPT2_COMPARE " " +
                                     path("tuned") + " " + path("logits"));
    EXPECT_EQ(theirs.status, 0) << theirs.out << theirs.err;
  }
}

TEST_F(Gpt2Example, FindsAWayToFitItsBudget) {
  const std::string wide = path("wide");
  ASSERT_EQ(
      run("--layers 4 --heads 4 --width 256 --positions 64 --words 300 --write-random " + wide)
          .status,
      0);
  const std::string step =
      "--model " + wide + " --text " + text_ + " --tokens 64 --batch-size 128 --steps 1 --budget ";
  const ShellResult recomputed = run(step + "200M");
  EXPECT_EQ(recomputed.status, 0) << recomputed.out << recomputed.err;
  EXPECT_THAT(recomputed.out, HasSubstr("every activation kept: does not fit"));
  EXPECT_THAT(recomputed.out, HasSubstr("within 200.0 MiB: recomputed blocks\n"));
  const ShellResult cut = run(step + "150M");
  EXPECT_EQ(cut.status, 0) << cut.out << cut.err;
  EXPECT_THAT(cut.out, HasSubstr("within 150.0 MiB: recomputed blocks, "));
  EXPECT_THAT(cut.out, HasSubstr(" micro-batches\n"));
  const ShellResult refused = run("--model " + wide + " --text " + text_ +
                                  " --tokens 64 --batch-size 16 --steps 1 --budget 84M");
  EXPECT_EQ(refused.status, 1) << refused.out;
  EXPECT_THAT(refused.err, HasSubstr("fewer --tokens or a smaller --batch-size"));
}

// Whatever processes divide, the losses are the same.
TEST_F(Gpt2Example, LearnsTheSameAtEachStageOfSharding) {
  const auto losses = [&](const std::string& how) {
    const ShellResult result = shell(kTwoGpt2 + train("--steps 4 --budget 500M " + how));
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr("the largest process took "));
    std::string found;
    const std::regex loss("step ./4: loss [.0-9]+");
    for (std::sregex_iterator it(result.out.begin(), result.out.end(), loss), end; it != end; ++it)
      found += it->str() + "\n";
    return found;
  };
  const std::string plain = losses("");
  EXPECT_EQ(std::count(plain.begin(), plain.end(), '\n'), 4) << plain;
  for (const int stage : {1, 2, 3}) {
    for (const std::string way : {"", " --recompute"})
      EXPECT_EQ(losses(core::str("--shard ", stage, way)), plain);
  }
  EXPECT_NE(losses("--shard 2 --micro-batches 2"), "");
  for (const std::string stage : {"0", "2", "3"})
    EXPECT_EQ(losses("--shard " + stage + " --export " + path("tuned" + stage)), plain);
  for (const std::string name : {"/model.safetensors", "/config.json"}) {
    const std::string whole = read_text(path("tuned0") + name);
    EXPECT_NE(whole, "");
    EXPECT_EQ(read_text(path("tuned2") + name), whole);
    EXPECT_EQ(read_text(path("tuned3") + name), whole);
  }
  const ShellResult refused = shell(kTwoGpt2 + train("--shard 2 --logits " + path("logits")));
  EXPECT_THAT(refused.out + refused.err, HasSubstr("expected --logits without --shard"));
}

/// The number behind `words`, in bytes; the text has megabytes.
double megabytes_after(const std::string& text, const std::string& words) {
  const std::size_t at = text.find(words);
  return at == std::string::npos ? 0.0 : 1e6 * std::stod(text.substr(at + words.size()));
}

TEST_F(Gpt2Example, ReadsTextByTheModelsTokenizer) {
  const auto use_tokenizer = [](const std::string& model) {
    std::filesystem::copy_file(test_folder() + std::string("/data/golden/tokenizer.json"),
                               model + "/tokenizer.json");
  };
  const ShellResult bytes = run(train("--steps 1"));
  EXPECT_THAT(bytes.out, HasSubstr("text: 9000 tokens, a byte each: there is no " + random_));
  use_tokenizer(random_);
  EXPECT_THAT(run(train("--steps 1")).err,
              HasSubstr("expected at most the model's 300 tokens, got 702 in " + random_));
  const std::string words = path("words"), tuned = path("tuned");
  ASSERT_EQ(
      run("--layers 1 --heads 2 --width 32 --positions 64 --words 702 --write-random " + words)
          .status,
      0);
  use_tokenizer(words);
  const ShellResult result = run("--model " + words + " --text " + text_ +
                                 " --tokens 32 --batch-size 4 --steps 2 --export " + tuned);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  std::smatch found;
  ASSERT_TRUE(std::regex_search(result.out, found, std::regex("text: ([0-9]+) tokens\n")));
  EXPECT_LT(std::stoi(found[1]), 9000);
  EXPECT_EQ(read_text(tuned + "/tokenizer.json"), read_text(words + "/tokenizer.json"));
}

// What the program takes beside tensors is not known ahead: budgets are told by a first run's
// table.
TEST_F(Gpt2Example, PlansWhatProcessesDivide) {
  const std::string wide = path("wide");
  ASSERT_EQ(
      run("--layers 4 --heads 4 --width 256 --positions 64 --words 300 --write-random " + wide)
          .status,
      0);
  const auto planned = [&](double budget) {
    return shell(kTwoGpt2 + "--model " + wide + " --text " + text_ +
                 " --tokens 32 --batch-size 4 --steps 2 --lr 3e-3 --plan --bandwidth 1M --budget " +
                 std::to_string(static_cast<std::int64_t>(budget)));
  };
  const std::string losses = "step 1/2: loss [.0-9]+";
  const auto first_loss = [&](const ShellResult& result) {
    std::smatch found;
    return std::regex_search(result.out, found, std::regex(losses)) ? found.str() : "none";
  };
  const double ample = 4e8;
  const ShellResult roomy = planned(ample);
  ASSERT_EQ(roomy.status, 0) << roomy.out << roomy.err;
  EXPECT_THAT(roomy.out, HasSubstr("chosen, because no faster one fits: O2 bf16"));
  const double beside = ample - megabytes_after(roomy.out, "budget ");
  const double least = megabytes_after(roomy.out, "the least budget that would do: ");
  ASSERT_GT(least, 1e7) << roomy.out;
  const ShellResult tight = planned(beside + least + 3e6);  // all on each rank takes 9 more
  EXPECT_EQ(tight.status, 0) << tight.out << tight.err;
  EXPECT_TRUE(std::regex_search(tight.out, std::regex("within .*, ZeRO .*; ZeRO stage [123]")))
      << tight.out;
  EXPECT_EQ(first_loss(tight), first_loss(roomy));
  const ShellResult refused = planned(beside + least - 3e6);
  EXPECT_EQ(refused.status, 1) << refused.out << refused.err;
  EXPECT_THAT(refused.out + refused.err, HasSubstr("expected a budget of at least "));
  EXPECT_THAT(refused.out + refused.err, HasSubstr(" MiB: --budget "));
  EXPECT_THAT(run(train("--plan --shard 1")).err, HasSubstr("expected --plan, which chooses"));
  EXPECT_THAT(run(train("--plan --opt-level O3")).err, HasSubstr("expected --opt-level O0, O1"));
}

TEST_F(Gpt2Example, SaysWhatIsWrong) {
  const ShellResult small = run(train("--budget 20M"));
  EXPECT_EQ(small.status, 1);
  EXPECT_THAT(small.err, HasSubstr("expected a --budget over"));
  EXPECT_THAT(run("--model " + path("nowhere") + " --text " + text_).err,
              HasSubstr("config.json, got nothing to read"));
  EXPECT_THAT(run("").err, HasSubstr("expected --model and --text"));
  EXPECT_EQ(run("--words 3").status, 2);
  EXPECT_THAT(run(train("--device tpu")).err, HasSubstr("tpu"));
  EXPECT_THAT(run(train("--device cuda:9")).err, HasSubstr("gpt2: [device]"));
}

}  // namespace
}  // namespace cairn::test
