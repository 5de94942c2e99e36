// plain_gpt and plain_gpt_cairn: a trainer with arrays of its own, alone and with Cairn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <sstream>

#include "08_plain/gpt.h"
#include "08_plain/text.h"
#include "support/near.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kPlain = CAIRN_PLAIN_PROGRAM;
const std::string kPlainCairn = CAIRN_PLAIN_CAIRN_PROGRAM;
const std::string kTwoRanks = std::string(CAIRN_RUN_PROGRAM) + " --nproc-per-node 2 ";
const std::string kPlainCkpt = CAIRN_CKPT_PROGRAM;

std::vector<double> losses_of(const std::string& command) {
  const ShellResult result = shell(command);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  std::vector<double> losses;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find(" loss ");
    if (at != std::string::npos) losses.push_back(std::stod(line.substr(at + 6)));
  }
  return losses;
}

// Central differences of the loss along the direction of each parameter's own gradient: their slope
// is its norm.
TEST(PlainGpt, GradientsAreCentralDifferences) {
  const plain::Sizes sizes{.vocabulary = 11, .tokens = 6, .width = 8, .heads = 2, .layers = 2};
  plain::Gpt<float> model(sizes, 3);
  std::mt19937 random(5);  // away from the initial values, at which the biases are 0
  std::normal_distribution<float> normal(0.0f, 0.3f);
  for (float& w : model.weights) w += normal(random);
  const plain::Batch batch = plain::Text(sizes.tokens).batch(7, 0, 3);
  model.forward(batch.inputs, batch.targets);
  model.backward();
  const std::vector<float> gradients = model.gradients, weights = model.weights;
  for (const plain::Parameter& parameter : model.parameters) {
    double norm = 0.0;
    for (std::size_t i = 0; i < parameter.size; ++i) {
      norm += static_cast<double>(gradients[parameter.begin + i]) * gradients[parameter.begin + i];
    }
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 1e-4) << parameter.name;
    double loss[2];
    const double h = 5e-3;
    for (int side = 0; side < 2; ++side) {
      for (std::size_t i = 0; i < parameter.size; ++i) {
        const double along = gradients[parameter.begin + i] / norm * (side == 0 ? -h : h);
        model.weights[parameter.begin + i] =
            static_cast<float>(weights[parameter.begin + i] + along);
      }
      loss[side] = model.forward(batch.inputs, batch.targets);
    }
    model.weights = weights;
    EXPECT_NEAR((loss[1] - loss[0]) / (2 * h), norm, 0.01 * norm + 1e-4) << parameter.name;
  }
}

TEST(PlainGpt, GradientsComeReadyOnceAndScaled) {
  const plain::Sizes sizes{.vocabulary = 11};
  plain::Gpt<float> model(sizes, 3);
  const plain::Batch batch = plain::Text(sizes.tokens).batch(0, 0, 1);
  model.forward(batch.inputs, batch.targets);
  model.backward();
  const std::vector<float> once = model.gradients;
  std::vector<int> ready(model.parameters.size(), 0);
  model.backward(1024.0f, [&](std::size_t i) { ++ready[i]; });
  EXPECT_THAT(ready, testing::Each(1));
  for (std::size_t i = 0; i < once.size(); ++i) ASSERT_FLOAT_EQ(model.gradients[i], 1024 * once[i]);
}

TEST(PlainGpt, Learns) {
  const std::vector<double> losses = losses_of(kPlainCairn + " --dtype bf16");
  ASSERT_EQ(losses.size(), 200u);
  EXPECT_LT(std::accumulate(losses.end() - 20, losses.end(), 0.0) / 20, 1.6);  // 2.4 at first
}

// Ten steps: Adam divides by the gradient's size, so that later ones enlarge what was rounded.
TEST(PlainGpt, LossesAreThoseOfTheProgramAlone) {
  const std::vector<double> alone = losses_of(kPlain + " --steps 10");
  ASSERT_EQ(alone.size(), 10u);
  expect_near(losses_of(kPlainCairn + " --dtype f32 --steps 10"), alone, 2e-5);
  expect_near(losses_of(kPlainCairn + " --dtype bf16 --steps 10"), alone, 3e-2);
  expect_near(losses_of(kPlainCairn + " --dtype f16 --steps 10 --loss-scale 1024"), alone, 3e-3);
}

TEST(PlainGpt, TwoRanksTrainAsOne) {
  expect_near(losses_of(kTwoRanks + kPlainCairn + " --dtype f32 --steps 10"),
              losses_of(kPlainCairn + " --dtype f32 --steps 10"), 2e-5);
}

TEST(PlainGpt, AnOverflowNamesParameterAndRankAndIsSkipped) {
  const ShellResult result =
      shell(kTwoRanks + kPlainCairn + " --dtype f16 --steps 12 --loss-scale 16777216");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("inf in the gradient of wte ("));
  EXPECT_THAT(result.err, HasSubstr(" on every rank, and "));
  EXPECT_THAT(result.err, HasSubstr(" on rank 0"));
  EXPECT_THAT(result.err, HasSubstr("loss scale 16777216 -> 8388608"));
  EXPECT_THAT(result.out, HasSubstr("step 12 loss 2."));
}

TEST(PlainGpt, KilledAndResumedTheBitsAreThose) {
  const ShellResult result =
      shell(kPlainCkpt + " prove-resume --kill-at 8 -- " + kTwoRanks + kPlainCairn +
            " --steps 16 --save-every 4 --checkpoint-dir {dir}");
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("resume: bit-exact"));
}

TEST(PlainGpt, BadUsageIsOneLine) {
  EXPECT_THAT(shell(kPlain + " --stepz 3").err, HasSubstr("expected a known flag"));
  EXPECT_THAT(shell(kPlainCairn + " --dtype f8").err, HasSubstr("f32, f16 or bf16"));
}

}  // namespace
}  // namespace cairn::test
