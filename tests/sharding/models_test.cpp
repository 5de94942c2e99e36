// Models as they are trained, over a hundred steps: a ConvNet and a GPT with tied embeddings have
// the bits of DistributedDataParallel at every stage, through an overflow, and through a save at
// one stage and number of ranks and a resume at another.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/step.h"

namespace cairn {
namespace {

using test::make;
using test::Recipe;
using test::TrainingOf;
using test::values;

/// Whole numbers below `end`.
Tensor numbers(const Shape& shape, std::uint64_t seed, std::int64_t end) {
  std::vector<std::int64_t> drawn;
  for (const double x : test::random_values(shape.numel(), seed, 0.0, static_cast<double>(end)))
    drawn.push_back(std::min(static_cast<std::int64_t>(x), end - 1));
  return Tensor::from(drawn, shape, DType::i64);
}

/// Batch norms stay f32 at O2; the second and the last weight are cut.
class ConvNet : public nn::Sequential {
 public:
  ConvNet() {
    manual_seed(41);
    add(nn::Conv2d(3, 8, 3, {.padding = 1, .bias = false}));
    add(nn::BatchNorm2d(8));
    add(nn::ReLU());
    add(nn::Conv2d(8, 20, 3, {.stride = 2, .padding = 1}));
    add(nn::BatchNorm2d(20));
    add(nn::ReLU());
    add(nn::GlobalAvgPool2d());
    add(nn::Linear(20, 77));
  }
  static Tensor batch(std::uint64_t seed) { return values({2, 3, 6, 6}, seed); }
  static Tensor loss(const Tensor& y, std::uint64_t seed) {
    return autograd::cross_entropy(y, numbers({2}, seed + 900000, 77));
  }
};

struct GptSizes {
  std::int64_t words = 67, width = 32, tokens = 6, layers = 2, feedforward = 40;
};

/// Its words are its head as well, outside of the unit that has them.
class Gpt : public nn::Module {
 public:
  explicit Gpt(const GptSizes& sizes = {}) : tokens_(sizes.tokens) {
    manual_seed(42);
    words_ = add_module("words", nn::Embedding(sizes.words, sizes.width));
    places_ = add_module("places", nn::Embedding(sizes.tokens, sizes.width));
    blocks_ = add_module("blocks", nn::Sequential());
    for (std::int64_t i = 0; i < sizes.layers; ++i)
      blocks_->add(nn::TransformerEncoderLayer(
          sizes.width, 2,
          {.feedforward = sizes.feedforward, .dropout = 0.0, .norm_first = true, .causal = true}));
    norm_ = add_module("norm", nn::LayerNorm(sizes.width));
  }
  std::string kind() const override { return "Gpt"; }
  Tensor forward(const Tensor& tokens) override {
    std::vector<std::int64_t> order(static_cast<std::size_t>(tokens_));
    std::iota(order.begin(), order.end(), 0);
    const Tensor places = (*places_)(Tensor::from(order, {tokens_}, DType::i64));
    const Tensor x = (*blocks_)((*words_)(tokens) + places);
    return autograd::linear((*norm_)(x), words_->weight());
  }
  static Tensor batch(std::uint64_t seed, const GptSizes& sizes = {}) {
    return numbers({2, sizes.tokens}, seed, sizes.words);
  }
  static Tensor loss(const Tensor& logits, std::uint64_t seed, const GptSizes& sizes = {}) {
    return autograd::cross_entropy(logits, batch(seed + 900000, sizes));
  }

 private:
  std::int64_t tokens_;
  std::shared_ptr<nn::Embedding> words_, places_;
  std::shared_ptr<nn::Sequential> blocks_;
  std::shared_ptr<nn::LayerNorm> norm_;
};

constexpr int kSteps = 100, kOverflow = 30, kSaved = 50;
const std::vector<test::Stage> kStages{test::kStates, test::kGradients, test::kParameters};

Recipe recipe_of(DType half) {
  return {.name = core::str(core::name(half)),
          .optimizer = make<optim::FusedAdam>(optim::AdamOptions{.lr = 3e-3, .weight_decay = 0.01}),
          .half = half,
          .overflow = kOverflow,
          .growth_interval = 20};
}

/// One training without shards, and one at each stage.
template <class Net>
class SideBySide {
 public:
  SideBySide(const Recipe& recipe, const parallel::ProcessGroup& group)
      : plain_(recipe, group, test::kPlain) {
    for (const test::Stage stage : kStages)
      divided_.push_back(std::make_unique<TrainingOf<Net>>(recipe, group, stage));
  }
  /// Returns how many were skipped.
  int train(int first, int last) {
    int skipped = 0;
    for (int step = first; step <= last; ++step) {
      const optim::StepResult expected = plain_.step();
      skipped += expected.applied ? 0 : 1;
      for (auto& one : divided_) {
        const optim::StepResult got = one->step();
        EXPECT_EQ(got.applied, expected.applied) << step << ": " << got.reason;
        EXPECT_EQ(got.reason, expected.reason) << step;
        if (expected.applied) {
          EXPECT_EQ(got.gradient_norm, expected.gradient_norm) << step;
        }
      }
      if (step % 10 == 0) compare(step);
      if (testing::Test::HasFailure()) break;
    }
    return skipped;
  }
  void compare(int step) {
    for (std::size_t i = 0; i < divided_.size(); ++i)
      EXPECT_EQ(test::difference_of_states(*divided_[i], plain_), "")
          << "stage " << i + 1 << ", step " << step;
  }
  void save(const std::string& folder) {
    plain_.state->save(folder + "/0", kSaved);
    for (std::size_t i = 0; i < divided_.size(); ++i)
      divided_[i]->state->save(core::str(folder, "/", i + 1), kSaved);
  }
  /// Each stage from the one after it; the last from DistributedDataParallel's.
  void resume(const std::string& folder) {
    EXPECT_TRUE(plain_.state->resume_latest(folder + "/0"));
    plain_.go_on_after(kSaved);
    for (std::size_t i = 0; i < divided_.size(); ++i) {
      const std::size_t from = (i + 2) % (divided_.size() + 1);
      EXPECT_TRUE(divided_[i]->state->resume_latest(core::str(folder, "/", from)));
      divided_[i]->go_on_after(kSaved);
    }
    compare(kSaved);
  }

 private:
  TrainingOf<Net> plain_;
  std::vector<std::unique_ptr<TrainingOf<Net>>> divided_;
};

template <class Net>
void expect_hundred_steps(DType half, int ranks, int ranks_after) {
  const auto folder = std::filesystem::temp_directory_path() /
                      core::str("cairn-sharding-models-", getuid(), "-", getpid());
  const Recipe recipe = recipe_of(half);
  test::run_threads(ranks, [&](parallel::ProcessGroup& group) {
    SideBySide<Net> all(recipe, group);
    EXPECT_EQ(all.train(1, kSaved), 1);
    all.save(folder.string());
  });
  if (!testing::Test::HasFailure()) {
    test::run_threads(ranks_after, [&](parallel::ProcessGroup& group) {
      SideBySide<Net> all(recipe, group);
      all.resume(folder.string());
      EXPECT_EQ(all.train(kSaved + 1, kSteps), 0);
    });
  }
  std::filesystem::remove_all(folder);
}

class HundredSteps : public testing::TestWithParam<std::tuple<DType, int>> {
 protected:
  template <class Net>
  void run() {
    if (core::default_device().is_cuda())
      GTEST_SKIP() << "NCCL adds up more than two ranks in an order of its own";
    const auto [half, ranks] = GetParam();
    expect_hundred_steps<Net>(half, ranks, ranks == 2 ? 3 : 2);
  }
};

TEST_P(HundredSteps, OfAConvNet) {
  run<ConvNet>();
}

TEST_P(HundredSteps, OfAGptWithTiedEmbeddings) {
  run<Gpt>();
}

std::string name_of_form(const testing::TestParamInfo<std::tuple<DType, int>>& info) {
  const auto& [half, ranks] = info.param;
  return core::str(core::name(half), "_", ranks, "_ranks");
}

INSTANTIATE_TEST_SUITE_P(, HundredSteps,
                         testing::Combine(testing::Values(DType::bf16, DType::f16),
                                          testing::Values(2, 3)),
                         name_of_form);

// Statistics of all ranks' batches, in the forward that stage 3 gathers weights for and in its
// backward.
TEST(ModelsOfSyncedNorms, HaveTheBitsOfDistributedDataParallel) {
  for (const int ranks : {2, 3}) {
    if (ranks > test::ranks_in_order()) continue;
    Recipe recipe = recipe_of(DType::bf16);
    recipe.syncs_batch_norm = true;
    recipe.overflow = 3;
    test::run_threads(ranks, [&](parallel::ProcessGroup& group) {
      SideBySide<ConvNet> all(recipe, group);
      EXPECT_EQ(all.train(1, 10), 1);
    });
  }
}

/// Of four steps with one batch, the first and the last loss.
std::pair<double, double> losses_of_gpt(const parallel::ProcessGroup& group, test::Stage stage,
                                        const GptSizes& sizes) {
  const auto model = [&] {
    const nn::DeferredInit deferred;
    return std::make_shared<Gpt>(sizes);
  }();
  const auto ddp = test::data_parallel(*model, group, stage);
  optim::FusedAdam optimizer(model->parameters(), {.lr = 3e-3});
  amp::Amp precision = amp::initialize(
      *model, optimizer,
      {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = ddp->world()});
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) {
    const Tensor loss = Gpt::loss((*ddp)(Gpt::batch(1, sizes)), 1, sizes);
    losses.push_back(loss.item());
    precision.backward(loss);
    test::expect_applied(precision.step());
  }
  return {losses.front(), losses.back()};
}

// What Adam keeps at O2, 12 bytes a parameter, is more than a rank may take.
TEST(ModelsInLittleMemory, TrainWhereTheirStatesFitNoRank) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "one variable for the host and its GPUs";
  const GptSizes sizes{.words = 512, .width = 128, .tokens = 16, .layers = 4, .feedforward = 512};
  std::int64_t elements = 0;
  for (const auto& [name, tensor] : Gpt(sizes).parameters()) elements += tensor.numel();
  setenv("CAIRN_DEVICE_MEMORY", std::to_string(12 * elements * 99 / 100).c_str(), 1);
  test::run_ranks(4, [&](parallel::ProcessGroup& group) {
    EXPECT_THROW((void)losses_of_gpt(group, test::kPlain, sizes), core::OutOfMemory);
    for (const test::Stage stage : kStages) {
      group.barrier();
      const auto [first, last] = losses_of_gpt(group, stage, sizes);
      EXPECT_LT(last, first - 1.0) << "stage " << static_cast<int>(*stage);
    }
  });
  unsetenv("CAIRN_DEVICE_MEMORY");
}

}  // namespace
}  // namespace cairn
