// A sharded training has the bits of DistributedDataParallel's: weights, masters, moments, norms,
// skips and loss scales, whatever the optimizer, the level and the number of ranks.
#include <gtest/gtest.h>

#include "parallel/ranks.h"
#include "sharding/training.h"

namespace cairn {
namespace {

using amp::OptLevel;
using test::make;
using test::Recipe;
using test::Training;

constexpr optim::AdamOptions kAdamOptions{.lr = 1e-2, .weight_decay = 0.01};

std::vector<Recipe> recipes_of_bits() {
  const auto adam = make<optim::FusedAdam>(kAdamOptions);
  const auto sgd = make<optim::FusedSGD>(optim::SgdOptions{.lr = 0.05, .momentum = 0.9});
  const optim::StateOptions compact{.moments = DType::bf16,
                                    .masters = optim::MasterStorage::remainder};
  return {
      {.name = "adam_O0", .optimizer = adam, .level = OptLevel::O0},
      {.name = "adam_O1", .optimizer = adam, .level = OptLevel::O1},
      {.name = "adam_O2_bf16", .optimizer = adam},
      {.name = "adam_O2_f16", .optimizer = adam, .half = DType::f16, .overflow = 5},
      {.name = "adam_O3", .optimizer = adam, .level = OptLevel::O3},
      {.name = "compact", .optimizer = adam, .states = compact},
      {.name = "clipped", .optimizer = adam, .max_norm = 0.05},
      {.name = "accumulated", .optimizer = adam, .max_norm = 0.05, .accumulates = true},
      {.name = "accumulated_f16",
       .optimizer = adam,
       .half = DType::f16,
       .accumulates = true,
       .overflow = 4},
      {.name = "two_losses",
       .optimizer = adam,
       .half = DType::f16,
       .max_norm = 0.05,
       .overflow = 2,
       .losses = 2},
      {.name = "three_losses_O1",
       .optimizer = sgd,
       .level = OptLevel::O1,
       .half = DType::f16,
       .overflow = 2,
       .losses = 3},
      {.name = "sgd", .optimizer = sgd},
      {.name = "larc", .optimizer = sgd, .larc = true},
      {.name = "larc_O0", .optimizer = sgd, .level = OptLevel::O0, .larc = true},
      {.name = "adagrad",
       .optimizer = make<optim::FusedAdagrad>(optim::AdagradOptions{.lr = 0.05})},
      {.name = "lamb", .optimizer = make<optim::FusedLAMB>(optim::LambOptions{.lr = 0.01})},
      {.name = "lamb_compact",
       .optimizer = make<optim::FusedLAMB>(optim::LambOptions{.lr = 0.01}),
       .states = compact,
       .accumulates = true},
      {.name = "novograd",
       .optimizer = make<optim::FusedNovoGrad>(optim::NovoGradOptions{.lr = 0.01})},
  };
}

class ShardedBits : public testing::TestWithParam<std::tuple<Recipe, int>> {};
class DividedGradients : public ShardedBits {};
class DividedWeights : public ShardedBits {};

/// within: of ShardedOptions::shard_within.
void expect_bits_of_plain(const Recipe& recipe, int world_size, test::Stage stage, int within = 0) {
  test::run_threads(world_size, [&](parallel::ProcessGroup& group) {
    Training plain(recipe, group, test::kPlain);
    Training sharded(recipe, group, stage, {.shard_within = within});
    const int copies = within == 0 ? 1 : world_size / within;
    int skipped = 0;
    for (int step = 1; step <= 8; ++step) {
      const optim::StepResult expected = plain.step(), got = sharded.step();
      skipped += expected.applied ? 0 : 1;
      ASSERT_EQ(got.applied, expected.applied) << "step " << step << ": " << got.reason;
      ASSERT_EQ(got.reason, expected.reason);
      if (expected.applied) {
        ASSERT_EQ(got.gradient_norm, expected.gradient_norm) << "step " << step;
      }
      ASSERT_EQ(got.clip_coefficient, expected.clip_coefficient) << "step " << step;
      ASSERT_EQ(test::difference_of_weights(sharded, plain), "") << "step " << step;
    }
    EXPECT_EQ(skipped > 0, recipe.overflow > 0);
    for (int loss = 0; loss < recipe.losses; ++loss)
      EXPECT_EQ(sharded.precision->loss_scale(loss), plain.precision->loss_scale(loss)) << loss;
    if (recipe.losses > 1) {
      EXPECT_NE(plain.precision->loss_scale(0), 4096);  // each has found an overflow of its own
    }

    std::int64_t moments = 0, masters = 0;
    EXPECT_EQ(test::difference_in_parts(sharded.optimizer->state_dict(),
                                        plain.optimizer->state_dict(), moments),
              "");
    EXPECT_EQ(test::difference_in_parts(sharded.net.state_dict(), plain.net.state_dict(), masters),
              "");
    std::int64_t elements = 0, in_parts = 0;
    for (const auto& [name, tensor] : sharded.net.parameters()) {
      elements += tensor.numel();
      const bool has_master = recipe.level == OptLevel::O2 && core::is_half(tensor.dtype());
      in_parts += has_master || stage == test::kParameters ? tensor.numel() : 0;
    }
    const auto in_all = [&](std::int64_t own) {
      return group.all_reduce_sum(static_cast<double>(own));
    };
    EXPECT_EQ(in_all(masters), static_cast<double>(in_parts * copies));
    EXPECT_EQ(std::fmod(in_all(moments), static_cast<double>(elements * copies)), 0.0);
    EXPECT_GT(in_all(moments), 0.0);
  });
}

TEST_P(ShardedBits, AreThoseOfDistributedDataParallel) {
  const auto& [recipe, world_size] = GetParam();
  expect_bits_of_plain(recipe, world_size, test::kStates);
}

// Each backward reduces: of two, the averages are summed.
TEST_P(DividedGradients, HaveTheBitsOfDistributedDataParallel) {
  auto [recipe, world_size] = GetParam();
  recipe.reduces_each = true;
  expect_bits_of_plain(recipe, world_size, test::kGradients);
}

TEST_P(DividedWeights, HaveTheBitsOfDistributedDataParallel) {
  auto [recipe, world_size] = GetParam();
  recipe.reduces_each = true;
  expect_bits_of_plain(recipe, world_size, test::kParameters);
}

struct HybridForm {
  int world_size, within;
};

// Under no_sync() a micro-batch's gradients are whole, and added to before they are averaged.
class UnderNoSync
    : public testing::TestWithParam<std::tuple<Recipe, HybridForm, parallel::ZeroStage>> {};

TEST_P(UnderNoSync, HasTheBitsOfDistributedDataParallel) {
  const auto& [recipe, form, stage] = GetParam();
  if (form.world_size > 2 && core::default_device().is_cuda())
    GTEST_SKIP() << "NCCL adds up more than two ranks in an order of its own";
  expect_bits_of_plain(recipe, form.world_size, stage, form.within);
}

std::string name_of(const testing::TestParamInfo<std::tuple<Recipe, int>>& info) {
  return core::str(std::get<0>(info.param).name, "_", std::get<1>(info.param), "_ranks");
}

INSTANTIATE_TEST_SUITE_P(, ShardedBits,
                         testing::Combine(testing::ValuesIn(recipes_of_bits()),
                                          testing::Values(2, 3, 4)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(, DividedGradients,
                         testing::Combine(testing::ValuesIn(recipes_of_bits()),
                                          testing::Values(2, 3, 4)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(, DividedWeights,
                         testing::Combine(testing::ValuesIn(recipes_of_bits()),
                                          testing::Values(2, 3, 4)),
                         name_of);

// Shards within a group of ranks, with copies of them in others.
class HybridBits
    : public testing::TestWithParam<std::tuple<Recipe, HybridForm, parallel::ZeroStage>> {};

TEST_P(HybridBits, AreThoseOfDistributedDataParallel) {
  auto [recipe, form, stage] = GetParam();
  recipe.in_turn = core::default_device().is_cuda();
  recipe.reduces_each = stage >= parallel::ZeroStage::gradients;
  expect_bits_of_plain(recipe, form.world_size, stage, form.within);
}

std::vector<Recipe> recipes_of_hybrids() {
  std::vector<Recipe> chosen;
  for (const Recipe& recipe : recipes_of_bits()) {
    for (const char* name : {"adam_O0", "adam_O2_f16", "clipped", "accumulated_f16", "sgd",
                             "larc_O0", "lamb_compact"}) {
      if (recipe.name == name) chosen.push_back(recipe);
    }
  }
  return chosen;
}

std::string name_of_hybrid(const testing::TestParamInfo<HybridBits::ParamType>& info) {
  const auto& [recipe, form, stage] = info.param;
  return core::str(recipe.name, "_", form.world_size, "_by_", form.within, "_stage_",
                   static_cast<int>(stage));
}

INSTANTIATE_TEST_SUITE_P(, HybridBits,
                         testing::Combine(testing::ValuesIn(recipes_of_hybrids()),
                                          testing::Values(HybridForm{4, 2}, HybridForm{6, 3},
                                                          HybridForm{6, 2}),
                                          testing::Values(parallel::ZeroStage::optimizer_states,
                                                          parallel::ZeroStage::gradients,
                                                          parallel::ZeroStage::parameters)),
                         name_of_hybrid);

std::vector<Recipe> recipes_of_no_sync() {
  std::vector<Recipe> chosen;
  for (Recipe recipe : recipes_of_bits()) {
    for (const char* name :
         {"adam_O0", "adam_O1", "adam_O2_f16", "adam_O3", "accumulated", "larc", "lamb_compact"}) {
      if (recipe.name != name) continue;
      recipe.accumulates = true;
      chosen.push_back(recipe);
    }
  }
  return chosen;
}

INSTANTIATE_TEST_SUITE_P(, UnderNoSync,
                         testing::Combine(testing::ValuesIn(recipes_of_no_sync()),
                                          testing::Values(HybridForm{2, 0}, HybridForm{3, 0},
                                                          HybridForm{4, 2}),
                                          testing::Values(parallel::ZeroStage::gradients,
                                                          parallel::ZeroStage::parameters)),
                         name_of_hybrid);

TEST(EvenPart, CoversEveryElementOnce) {
  for (const std::int64_t numel : {0, 1, 1023, 1024, 1025, 100, 4096, 100003}) {
    for (const int ranks : {1, 2, 3, 7, 256}) {
      std::int64_t at = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const core::ElementRange part = core::even_part(numel, rank, ranks);
        ASSERT_EQ(part.begin, at);
        ASSERT_LE(part.size(), numel / ranks + 1024);
        ASSERT_TRUE(part.end == numel || part.end % 1024 == 0);
        at = part.end;
      }
      ASSERT_EQ(at, numel);
    }
  }
}

}  // namespace
}  // namespace cairn
