// Models that are born in parts: described without memory, then made, or read from a file, one
// weight after another, of which each rank keeps its part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/deferred.h"
#include "cairn/core/memory.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"
#include "support/step.h"

namespace cairn {
namespace {

using test::kGradients;
using test::kParameters;
using test::kStates;
using ::testing::HasSubstr;

constexpr std::int64_t kWidth = 301, kLayers = 8;
constexpr std::size_t kWeightBytes = kWidth * kWidth * 4;  // of one, in f32

nn::Sequential deep_net() {
  nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net.add(nn::Linear(kWidth, kWidth));
  return net;
}

nn::Sequential deferred_net() {
  const nn::DeferredInit deferred;
  return deep_net();
}

core::MemoryStats stats() {
  return core::memory_stats(core::default_device());
}

struct Level {
  const char* name;
  amp::OptLevel level;
  optim::StateOptions states = {};
};
const Level kLevels[] = {
    {"O0", amp::OptLevel::O0},
    {"O1", amp::OptLevel::O1},
    {"O2", amp::OptLevel::O2},
    {"O2_compact",
     amp::OptLevel::O2,
     {.moments = DType::bf16, .masters = optim::MasterStorage::remainder}},
    {"O3", amp::OptLevel::O3},
};

/// A training by DistributedDataParallel (no stage) or in parts, of a model that has its values.
struct Whole {
  Whole(nn::Sequential& model, const Level& c, const parallel::ProcessGroup& group,
        test::Stage stage, int within = 0)
      : net(model) {
    if (stage) {
      ddp = std::make_unique<parallel::ShardedDataParallel>(
          net, group, parallel::ShardedOptions{.stage = *stage, .shard_within = within});
    } else {
      ddp = std::make_unique<parallel::DistributedDataParallel>(net, group);
    }
    optimizer = std::make_unique<optim::FusedAdam>(net.parameters());
    optimizer->set_state_options(c.states);
    precision.emplace(amp::initialize(
        net, *optimizer, {.opt_level = c.level, .half_dtype = DType::bf16, .world = ddp->world()}));
  }
  void step(const Tensor& x) {
    precision->backward(test::loss_of((*ddp)(x)));
    test::expect_applied(precision->step());
  }
  nn::Sequential& net;
  std::unique_ptr<parallel::DistributedDataParallel> ddp;
  std::unique_ptr<optim::FusedAdam> optimizer;
  std::optional<amp::Amp> precision;
};

class BornInParts : public testing::TestWithParam<std::tuple<Level, parallel::ZeroStage>> {};

TEST_P(BornInParts, HasTheBitsOfAModelThatWasWhole) {
  const auto& [c, stage] = GetParam();
  const int ranks = core::default_device().is_cuda() ? 2 : 4;
  test::run_threads(ranks, [&](parallel::ProcessGroup& group) {
    manual_seed(3);
    nn::Sequential plain = deep_net();
    manual_seed(3);
    nn::Sequential parts = deferred_net();
    Whole expected(plain, c, group, test::kPlain), got(parts, c, group, stage, 2);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const Tensor x = test::inputs(group, step, kWidth);
      expected.step(x);
      got.step(x);
    }
    const auto whole = got.ddp->gather_parameters();
    EXPECT_EQ(test::difference_of_weights(parts, plain), "");
  });
}

INSTANTIATE_TEST_SUITE_P(, BornInParts,
                         testing::Combine(testing::ValuesIn(kLevels),
                                          testing::Values(parallel::ZeroStage::optimizer_states,
                                                          parallel::ZeroStage::parameters)),
                         [](const auto& info) {
                           return core::str(std::get<0>(info.param).name, "_stage_",
                                            static_cast<int>(std::get<1>(info.param)));
                         });

/// From the description of the model to the end of its first forward, a process holds its parts and
/// a few whole weights.
TEST(BornInPartsMemory, IsTheRanksPartsAndOneWeight) {
  test::run_ranks(4, [](parallel::ProcessGroup& group) {
    for (const Level& c : kLevels) {
      if (c.level == amp::OptLevel::O1) continue;  // keeps half copies of all weights in a forward
      SCOPED_TRACE(c.name);
      const std::size_t before = stats().current_total;
      core::reset_peak_memory(core::default_device());
      nn::Sequential net = deferred_net();
      Whole training(net, c, group, kParameters);
      {
        const autograd::NoGradGuard no_grad;
        (void)(*training.ddp)(test::inputs(group, 1, kWidth));
      }
      const std::size_t most = stats().peak_total - before;
      // f32 masters or weights and half weights, of which a quarter is here; then the weight at
      // work, drawn on the host, in f32 and in half, or two units of a forward.
      EXPECT_LT(most, kLayers * kWeightBytes * 6 / 4 / 4 + 5 * kWeightBytes / 2);
      EXPECT_LT(most, kLayers * kWeightBytes / 3 * 2) << "less than the weights alone";
      for (const NamedTensor& weight : net.parameters()) {
        if (weight.tensor.numel() < 1024) continue;
        EXPECT_FALSE(weight.tensor.storage()->has_memory()) << weight.name;
      }
    }
  });
}

TEST(BornInPartsMemory, OfStagesThatKeepWholeWeightsHasNoWholeMasters) {
  test::run_ranks(4, [&](parallel::ProcessGroup& group) {
    const std::size_t before = stats().current_total;
    core::reset_peak_memory(core::default_device());
    nn::Sequential net = deferred_net();
    Whole training(net, kLevels[2], group, kGradients);
    const std::size_t most = stats().peak_total - before;
    EXPECT_LT(most, kLayers * kWeightBytes / 2 + kLayers * kWeightBytes / 4 + 3 * kWeightBytes);
  });
}

TEST(BornInPartsMemory, OfAFileHasOneOfItsTensors) {
  test::run_ranks(4, [](parallel::ProcessGroup& group) {
    const std::string path =
        core::str(::testing::TempDir(), "cairn-born-in-parts-", group.rank(), ".safetensors");
    manual_seed(4);
    checkpointing::write_safetensors(path, deep_net().parameters());
    const std::size_t before = stats().current_total;
    core::reset_peak_memory(core::default_device());
    nn::Sequential net = deferred_net();
    const checkpointing::LoadReport report = checkpointing::load(net, path);
    EXPECT_EQ(report.loaded.size(), 2U * kLayers);
    std::filesystem::remove(path);  // it is open
    EXPECT_THAT(core::deferred(net.parameters()[0].tensor), HasSubstr("'0.weight' of a file"));
    Whole training(net, kLevels[2], group, kParameters);
    EXPECT_LT(stats().peak_total - before,
              kLayers * kWeightBytes * 6 / 4 / 4 + 5 * kWeightBytes / 2);
    manual_seed(4);
    nn::Sequential same = deep_net();
    Whole expected(same, kLevels[2], group, test::kPlain);
    const Tensor x = test::inputs(group, 1, kWidth);
    training.step(x);
    expected.step(x);
    const auto whole = training.ddp->gather_parameters();
    EXPECT_EQ(test::difference_of_weights(net, same), "");
  });
}

TEST(BornInPartsOfRanks, ThatWouldBeginWithOtherValuesIsAnError) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    manual_seed(static_cast<std::uint64_t>(group.rank()));
    nn::Sequential net = deferred_net();
    EXPECT_THAT(test::message_of<core::Error>(
                    [&] { parallel::ShardedDataParallel(net, group, {.stage = *kStates}); }),
                HasSubstr("deferred: uniform in "));
  });
}

}  // namespace
}  // namespace cairn
