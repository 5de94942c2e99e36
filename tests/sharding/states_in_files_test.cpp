// Masters and moments in files have the bits of those in memory: with DistributedDataParallel and
// in every stage of ShardedDataParallel, and a checkpoint of the one resumes the other.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cairn/core/file_memory.h"
#include "cairn/kernels/master_weight.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/step.h"

namespace cairn {
namespace {

using test::make;
using test::Recipe;
using test::Training;

std::string folder_of_files() {
  return std::filesystem::temp_directory_path().string();
}

Recipe in_files(Recipe recipe) {
  recipe.states.folder = folder_of_files();
  return recipe;
}

std::vector<Recipe> recipes_in_files() {
  const auto adam = make<optim::FusedAdam>(optim::AdamOptions{.lr = 1e-2});
  const optim::StateOptions compact{.moments = DType::bf16,
                                    .masters = optim::MasterStorage::remainder};
  return {
      {.name = "O0", .optimizer = adam, .level = amp::OptLevel::O0},
      {.name = "O2_f16_clipped",
       .optimizer = adam,
       .half = DType::f16,
       .max_norm = 0.05,
       .overflow = 5},
      {.name = "compact_accumulated", .optimizer = adam, .states = compact, .accumulates = true},
      {.name = "lamb", .optimizer = make<optim::FusedLAMB>(optim::LambOptions{.lr = 0.01})},
      {.name = "larc",
       .optimizer = make<optim::FusedSGD>(optim::SgdOptions{.lr = 0.05, .momentum = 0.9}),
       .larc = true},
      {.name = "novograd",
       .optimizer = make<optim::FusedNovoGrad>(optim::NovoGradOptions{.lr = 0.01})},
      {.name = "adagrad",
       .optimizer = make<optim::FusedAdagrad>(optim::AdagradOptions{.lr = 0.05})},
  };
}

/// Of the tied weight's moment, or of this rank's part of it.
bool lies_in_file(const Training& training, const char* moment) {
  const StateDict state = training.optimizer->state_dict();
  const auto& entry = state.dict("state").dict("tied").dict("weight");
  const StateDict::Value& value = *entry.find(moment);
  const auto* shard = std::get_if<core::Shard>(&value);
  return core::lies_in_file(shard != nullptr ? shard->tensor : std::get<Tensor>(value));
}

class ShardedStatesInFiles : public testing::TestWithParam<std::tuple<Recipe, int, test::Stage>> {};

TEST_P(ShardedStatesInFiles, HaveTheBitsOfStatesInMemory) {
  auto [recipe, world_size, stage] = GetParam();
  const bool divides = stage == test::kGradients || stage == test::kParameters;
  recipe.reduces_each = divides;
  test::run_threads(world_size, [&, &recipe = recipe](parallel::ProcessGroup& group) {
    Training memory(recipe, group, test::kPlain), files(in_files(recipe), group, stage);
    for (int step = 1; step <= 50; ++step) {
      const optim::StepResult expected = memory.step(), got = files.step();
      ASSERT_EQ(got.applied, expected.applied) << "step " << step << ": " << got.reason;
      ASSERT_EQ(got.clip_coefficient, expected.clip_coefficient) << "step " << step;
    }
    ASSERT_EQ(test::difference_of_states(files, memory), "");
  });
}

std::string form_of(const testing::TestParamInfo<std::tuple<Recipe, int, test::Stage>>& info) {
  const auto& [recipe, world_size, stage] = info.param;
  return core::str(recipe.name, "_", world_size, "_ranks_",
                   stage ? core::str("stage_", static_cast<int>(*stage)) : "plain");
}

INSTANTIATE_TEST_SUITE_P(, ShardedStatesInFiles,
                         testing::Combine(testing::ValuesIn(recipes_in_files()),
                                          testing::Values(2, 3),
                                          testing::Values(test::kPlain, test::kStates,
                                                          test::kGradients, test::kParameters)),
                         form_of);

TEST(StatesInFilesOfRanks, ResumeInMemoryAndTheOtherWayRound) {
  for (Recipe recipe : {recipes_in_files()[0], recipes_in_files()[2]}) {
    recipe.reduces_each = true;
    const auto dir = std::filesystem::temp_directory_path() /
                     core::str("cairn-states-in-files-", getuid(), "-", getpid());
    const auto save = [&](const Recipe& how, const char* name, test::Stage stage) {
      test::run_threads(2, [&](parallel::ProcessGroup& group) {
        Training training(how, group, stage);
        for (int step = 0; step < 4; ++step) test::expect_applied(training.step());
        training.state->save((dir / name).string(), 4);
      });
    };
    save(recipe, "memory", test::kPlain);
    save(in_files(recipe), "files", test::kGradients);
    for (const test::Stage stage : {test::kPlain, test::kStates, test::kParameters}) {
      test::run_threads(3, [&](parallel::ProcessGroup& group) {
        Training memory(recipe, group, test::kPlain), files(in_files(recipe), group, stage);
        ASSERT_TRUE(memory.state->resume_latest((dir / "files").string()));
        ASSERT_TRUE(files.state->resume_latest((dir / "memory").string()));
        ASSERT_EQ(test::difference_of_states(files, memory), "");
        EXPECT_TRUE(lies_in_file(files, "exp_avg"));
        EXPECT_FALSE(lies_in_file(memory, "exp_avg"));
        test::expect_applied(memory.step());
        test::expect_applied(files.step());
        ASSERT_EQ(test::difference_of_states(files, memory), "");
      });
    }
    std::filesystem::remove_all(dir);
  }
}

TEST(StatesInFilesOfRanks, AmpMakesMastersThereAndTakesThemBack) {
  test::run_threads(1, [](parallel::ProcessGroup& group) {
    Training memory(test::kAdam, group, test::kPlain),
        files(in_files(test::kAdam), group, test::kPlain);
    const auto tied = [](Training& training) {
      for (const auto& [name, tensor] : training.net.parameters())
        if (name == "tied.weight") return tensor;
      return Tensor();
    };
    EXPECT_TRUE(core::lies_in_file(kernels::MasterWeight::of(tied(files))->tensor()));
    for (Training* training : {&memory, &files}) {
      test::expect_applied(training->step());
      training->precision->release();
      EXPECT_FALSE(core::lies_in_file(tied(*training)));
    }
    ASSERT_EQ(test::difference_of_states(files, memory), "");
  });
}

}  // namespace
}  // namespace cairn
