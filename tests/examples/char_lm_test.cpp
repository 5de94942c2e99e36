// char_lm on sentences: below what counting bytes and pairs of bytes predicts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "tools/shell.h"

namespace cairn::test {
namespace {

const std::string kCharLm = CAIRN_CHAR_LM_PROGRAM;

/// Sentences of few words in a fixed order of kinds: what comes next hangs on more than a byte.
std::string sentences(int count) {
  const std::vector<std::vector<std::string>> kinds = {
      {"The small ", "The old ", "The quiet "},
      {"gardener ", "painter ", "teacher ", "sailor "},
      {"watches ", "follows ", "remembers "},
      {"the river ", "a letter ", "the lantern ", "a bridge "},
      {"in the morning.\n", "after the storm.\n", "without a word.\n"}};
  std::mt19937 random(1);
  std::string text;
  for (int i = 0; i < count; ++i) {
    for (const auto& words : kinds) text += words[random() % words.size()];
  }
  return text;
}

TEST(CharLm, BeatsUnigramsAndBigramsAndPrintsASample) {
  const TemporaryFolder folder;
  std::ofstream(folder / "text") << sentences(3000);
  const ShellResult result =
      shell(kCharLm +
            " --half-dtype bf16 --steps 300 --width 96 --layers 2 --tokens "
            "64 --lr 3e-3 --sample 50 --text " +
            (folder / "text").string() + " --observe " + (folder / "run").string());
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const std::string text = read_text(folder / "run/metrics.jsonl");
  const auto last = nlohmann::json::parse(text.substr(text.rfind('\n', text.size() - 2) + 1));
  EXPECT_LT(last["bigram_loss"], last["unigram_loss"]);
  EXPECT_LT(last["test_loss"], last["bigram_loss"]);
  EXPECT_THAT(result.out, testing::HasSubstr("The "));
}

TEST(CharLm, BadUsage) {
  EXPECT_EQ(shell(kCharLm + " --text /no/such/file").status, 2);
  EXPECT_EQ(shell(kCharLm + " --width 10 --heads 3").status, 1);
}

}  // namespace
}  // namespace cairn::test
