// char_lm on the project's own docs: below what counting bytes and pairs of bytes predicts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tools/shell.h"

namespace cairn::test {
namespace {

const std::string kCharLm = CAIRN_CHAR_LM_PROGRAM;

TEST(CharLm, BeatsUnigramsAndBigramsAndPrintsASample) {
  const TemporaryFolder folder;
  const ShellResult result = shell(kCharLm +
                                   " --half-dtype bf16 --steps 800 --width 96 --layers 2 --tokens "
                                   "64 --lr 3e-3 --sample 50 --metrics " +
                                   (folder / "m").string());
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const std::string text = read_text(folder / "m");
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
