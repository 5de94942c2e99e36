// cairn-ckpt merge and reshard on what a training at each stage of ZeRO has saved: what they make
// has the bits of the same training under DistributedDataParallel, and resumes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "shell.h"
#include "support/step.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

constexpr int kSavedStep = 3;

Recipe saved_recipe() {
  Recipe recipe = kAdam;
  recipe.half = DType::f16;  // whose loss scale is a state as well
  return recipe;
}

void train_and_save(int ranks, Stage stage, const std::string& dir) {
  run_threads(ranks, [&](parallel::ProcessGroup& group) {
    Training training(saved_recipe(), group, stage);
    for (int step = 0; step < kSavedStep; ++step) expect_applied(training.step());
    training.state->save(dir, kSavedStep);
  });
}

/// By name: ranks' files come in another order.
std::map<std::string, std::vector<double>> tensors_in(const StateDict& state) {
  std::vector<std::pair<std::string, StateDict::Value>> all;
  tensors_of(state, "", all);
  std::map<std::string, std::vector<double>> values;
  for (const auto& [name, value] : all) values[name] = std::get<Tensor>(value).to_vector<double>();
  return values;
}

/// Of whole tensors, as the checkpoint's own rules put them together.
void expect_same_states(const std::string& step, const std::string& expected_step) {
  const StateDict got = checkpointing::read_checkpoint(step),
                  expected = checkpointing::read_checkpoint(expected_step);
  for (const char* part : {"model", "optimizer"}) {
    const auto own = tensors_in(got.dict(part)), others = tensors_in(expected.dict(part));
    EXPECT_EQ(own.size(), others.size());
    for (const auto& [name, values] : others)
      EXPECT_TRUE(own.contains(name) && own.at(name) == values) << step << ": " << name;
  }
}

void expect_resume_alike(int ranks, Stage stage, const std::string& dir,
                         const std::string& expected_dir) {
  run_threads(ranks, [&](parallel::ProcessGroup& group) {
    Training got(saved_recipe(), group, stage), expected(saved_recipe(), group, kPlain);
    ASSERT_TRUE(got.state->resume_latest(dir));
    ASSERT_TRUE(expected.state->resume_latest(expected_dir));
    for (int step = 0; step < 2; ++step) {
      expect_applied(got.step());
      expect_applied(expected.step());
    }
    EXPECT_EQ(difference_of_states(got, expected), "");
  });
}

class ShardedCheckpoint : public testing::TestWithParam<parallel::ZeroStage> {};

TEST_P(ShardedCheckpoint, IsMergedAndReshardedToTheBitsOfAWholeOne) {
  const TemporaryFolder folder;
  const std::string plain = (folder / "plain").string(), sharded = (folder / "sharded").string();
  const std::string merged = (folder / "merged").string(), cut = (folder / "cut").string();
  const std::string name = "/step-00000003", program = CAIRN_CKPT_PROGRAM;
  train_and_save(3, kPlain, plain);
  train_and_save(3, GetParam(), sharded);
  const ShellResult merge = shell(program + " merge " + sharded + " " + merged);
  ASSERT_EQ(merge.status, 0) << merge.err;
  EXPECT_THAT(merge.out, HasSubstr("1 rank(s)"));
  const ShellResult reshard =
      shell(program + " reshard " + sharded + " " + cut + name + " --world 5");
  ASSERT_EQ(reshard.status, 0) << reshard.err;
  EXPECT_THAT(shell(program + " inspect " + cut).out, HasSubstr("saved by 5 rank(s)"));
  for (const std::string& made : {merged, cut}) {
    EXPECT_EQ(shell(program + " verify " + made).status, 0) << made;
    expect_same_states(made + name, plain + name);
    expect_resume_alike(1, kPlain, made, plain);
    expect_resume_alike(2, GetParam(), made, plain);
  }
}

INSTANTIATE_TEST_SUITE_P(, ShardedCheckpoint,
                         testing::Values(parallel::ZeroStage::optimizer_states,
                                         parallel::ZeroStage::gradients,
                                         parallel::ZeroStage::parameters),
                         [](const auto& info) {
                           return core::str("of_stage_", static_cast<int>(info.param));
                         });

}  // namespace
}  // namespace cairn::test
