// Ways to keep less for the backward, against plain training: bits, memory, operations run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/autograd/saved_bytes.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "checkpointing/activations.h"
#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::checkpointing::activations {
namespace {

using ::testing::HasSubstr;

/// Counts replayed operations by name.
class Replays : public autograd::ScopedObserver {
 public:
  std::map<std::string, int> count;

 private:
  void on_end(const autograd::OpEvent& event) override {
    if (event.phase == autograd::Phase::recompute) ++count[event.name];
  }
};

// ---- Policies

struct Mlp {
  Tensor w1 = leaf({64, 16}, 1), w2 = leaf({16, 64}, 2);
  Tensor operator()(const Tensor& x) const {
    return autograd::linear(autograd::gelu(autograd::linear(x, w1)), w2);
  }
  Values gradients() {
    Values all;
    for (Tensor* w : {&w1, &w2}) {
      all.push_back(w->grad().to_vector());
      w->clear_grad();
    }
    return all;
  }
};

TEST(Policies, KeptOperationsDoNotRunAgain) {
  Mlp mlp;
  const Tensor x = test::normal_tensor({32, 16}, 3);
  autograd::backward(autograd::sum(mlp(x)));
  const Values plain = mlp.gradients();
  const auto replays = [&](const CheckpointOptions& options) {
    const Tensor loss = autograd::sum(
        autograd::tanh(checkpoint([&](const Tensor& z) { return mlp(z); }, x, options)));
    Replays replays;
    autograd::backward(loss);
    mlp.gradients();
    return replays.count;
  };
  using Count = std::map<std::string, int>;
  EXPECT_EQ(replays({}), (Count{{"linear", 1}, {"gelu", 1}}));  // early stop: not the second one
  EXPECT_EQ(replays({.policy = recompute_only({"gelu"})}), (Count{{"gelu", 1}}));
  EXPECT_EQ(replays({.policy = recompute_cheap()}), (Count{{"gelu", 1}}));
  EXPECT_EQ(replays({.policy = save_only({"gelu"})}), (Count{{"linear", 1}}));
  EXPECT_EQ(replays({.policy = recompute_cheap(), .preferred_bytes = 0}),
            (Count{{"linear", 1}, {"gelu", 1}}));
  EXPECT_EQ(replays({.policy = save_only({"linear"}), .preferred_bytes = 0}), (Count{{"gelu", 1}}));
  EXPECT_THAT(test::message_of<core::InvalidArgument>([] { recompute_only({"gelo"}); }),
              HasSubstr("got 'gelo'"));
  const CheckpointOptions no_offload{
      .policy = [](const SegmentOperation&) { return Treatment::must_offload; }};
  EXPECT_THAT(test::message_of<core::InvalidArgument>([&] { replays(no_offload); }),
              HasSubstr("CheckpointOptions::offload"));
}

TEST(Policies, RecomputingActivationsOnlyKeepsTheProductsOnly) {
  const Mlp mlp;
  const Tensor x = test::normal_tensor({32, 16}, 3);
  const auto kept = [&](const CheckpointOptions& options) {
    const std::size_t before = live();
    const Tensor y = checkpoint([&](const Tensor& z) { return mlp(z); }, x, options);
    return live() - before;
  };
  const std::size_t hidden = 32 * 64 * 4, result = 32 * 16 * 4;
  EXPECT_EQ(kept({}), result);
  EXPECT_EQ(kept({.policy = recompute_only({"gelu"})}), hidden + result);
  EXPECT_EQ(kept({.policy = save_only({"linear", "gelu"})}), 2 * hidden + result);  // as plain
}

TEST(Policies, SeeEachOperationWithItsNumberAmongThoseOfItsName) {
  const Mlp mlp;
  std::vector<SegmentOperation> seen;
  const Policy policy = [&](const SegmentOperation& operation) {
    seen.push_back(operation);
    return Treatment::must_recompute;
  };
  checkpoint([&](const Tensor& z) { return mlp(z); }, test::normal_tensor({32, 16}, 3),
             {.policy = policy});
  EXPECT_EQ(seen, (std::vector<SegmentOperation>{{"linear", 0}, {"gelu", 0}, {"linear", 1}}));
}

// Once the segment keeps so much, preferences count no more.
TEST(Policies, PreferencesEndWithTheirBytes) {
  const Tensor x = leaf({32, 16}, 3);
  const Policy all = [](const SegmentOperation&) { return Treatment::prefer_save; };
  const auto replays = [&](std::size_t bytes) {
    const Segment chain = [](Tensor z) {
      for (int i = 0; i < 4; ++i) z = autograd::tanh(z);
      return z;
    };
    const Tensor loss =
        autograd::sum(checkpoint(chain, x, {.policy = all, .preferred_bytes = bytes}));
    Replays replays;
    autograd::backward(loss);
    return replays.count["tanh"];
  };
  EXPECT_EQ(replays(SIZE_MAX), 0);
  EXPECT_EQ(replays(2 * x.nbytes()), 1);
  EXPECT_EQ(replays(0), 3);  // a replay ends before the last one
}

// ---- What is kept, counted

TEST(SavedBytes, AreCountedByOperationAndModule) {
  manual_seed(1);
  nn::Sequential model;
  model.add(nn::Linear(16, 64));
  model.add(nn::GELU());
  model.add(nn::Linear(64, 8));
  model.add(nn::Tanh());
  const Tensor x = test::normal_tensor({32, 16}, 3);
  const auto kept_of = [](const std::function<Tensor()>& forward) {
    const std::size_t before = live();
    const autograd::SavedBytes kept = autograd::saved_bytes(forward);
    EXPECT_EQ(live(), before);
    return kept;
  };
  using Bytes = std::map<std::string, std::int64_t>;
  // The first layer keeps x, the GELU its input, the second layer the GELU's result, tanh its own.
  const auto plain = kept_of([&] { return model(x); });
  EXPECT_EQ(
      plain.by_operation,
      (Bytes{{"linear", 32 * 16 * 4 + 32 * 64 * 4}, {"gelu", 32 * 64 * 4}, {"tanh", 32 * 8 * 4}}));
  EXPECT_EQ(plain.by_module,
            (Bytes{{"0", 32 * 16 * 4 + 32 * 64 * 4}, {"2", 32 * 64 * 4 + 32 * 8 * 4}}));
  EXPECT_EQ(plain.total, 32 * 4 * (16 + 64 + 64 + 8));
  const auto recomputed =
      kept_of([&] { return checkpoint([&](const Tensor& z) { return model(z); }, x); });
  EXPECT_EQ(recomputed.by_operation, (Bytes{{"", 32 * 16 * 4}}));
}

// ---- Strategies

TEST(Strategies, AllHaveTheBitsOfThePlainChain) {
  nn::Sequential model;
  manual_seed(1);
  for (int i = 0; i < 5; ++i) {
    model.add(nn::Linear(8, 8));
    model.add(nn::Tanh());
  }
  const Tensor x = test::normal_tensor({4, 8}, 3);
  const Values plain = gradients_of(model, [&] { return model(x); });
  const std::vector<Strategy> all{Segments{3},    SqrtSegments{}, Uniform{1},  Uniform{4},
                                  FirstBlocks{0}, FirstBlocks{7}, Recursive{}, ConstantMemory{}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(gradients_of(model, [&] { return checkpoint_sequential(model, all[i], x); }), plain)
        << "strategy " << i;
  }
  const std::vector<Strategy> refused{Segments{0}, Segments{11},    Uniform{0},
                                      Uniform{11}, FirstBlocks{-1}, FirstBlocks{11}};
  for (const Strategy& strategy : refused) {
    EXPECT_THROW(checkpoint_sequential(model, strategy, x), core::InvalidArgument);
  }
}

// The peak of a step over a chain of n functions, in activations above what stands before, and the
// operations that were replayed.
struct Cost {
  double peak = 0;
  int replays = 0;
};
Cost cost_of(int n, const Strategy& strategy) {
  const Tensor x = leaf({64, 64}, 1);
  const std::vector<Segment> chain(static_cast<std::size_t>(n),
                                   [](const Tensor& y) { return autograd::tanh(y); });
  const std::size_t before = live();
  core::reset_peak_memory(core::default_device());
  Replays replays;
  autograd::backward(autograd::sum(checkpoint_sequential(chain, strategy, x)));
  const std::size_t peak = core::memory_stats(core::default_device()).peak_total - before;
  return {static_cast<double>(peak) / static_cast<double>(x.nbytes()), replays.count["tanh"]};
}

TEST(Strategies, MemoryScalesAsPromised) {
  std::map<int, Cost> sqrt, recursive, constant;
  for (const int n : {16, 64, 256}) {
    EXPECT_NEAR(cost_of(n, Segments{1}).peak, n, 4) << n;
    sqrt[n] = cost_of(n, SqrtSegments{});
    recursive[n] = cost_of(n, Recursive{});
    if (n < 256) constant[n] = cost_of(n, ConstantMemory{});
    EXPECT_LE(sqrt[n].peak, 2 * std::sqrt(n) + 4) << n;
    EXPECT_LE(sqrt[n].replays, n) << n;
    EXPECT_LE(recursive[n].peak, std::log2(n) + 4) << n;
    EXPECT_LE(recursive[n].replays, n * std::log2(n) / 2) << n;
  }
  EXPECT_EQ(constant[16].peak, constant[64].peak);
  EXPECT_LE(constant[64].peak, 5);
  EXPECT_LE(constant[64].replays, 64 * 64 / 2);
}

}  // namespace
}  // namespace cairn::checkpointing::activations
