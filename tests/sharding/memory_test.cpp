// What gradients (ZeRO, stage 2) and weights (stage 3) that lie in parts take.
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "cairn/core/memory.h"
#include "parallel/ranks.h"
#include "sharding/side_by_side.h"

namespace cairn {
namespace {

using core::MemoryCategory;
using test::inputs;
using test::loss_of;
using test::stage_3;

const parallel::ShardedOptions kGradientsInParts{.stage = parallel::ZeroStage::gradients};

std::size_t held(MemoryCategory category) {
  return core::memory_stats(core::default_device()).of(category);
}

/// Layers at O2 in bf16 with Adam, divided.
struct DividedLayers {
  DividedLayers(nn::Sequential layers, const parallel::ProcessGroup& group,
                const parallel::ShardedOptions& options)
      : net(std::move(layers)), sharded(net, group, options), optimizer(net.parameters()) {
    precision.emplace(amp::initialize(
        net, optimizer,
        {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16, .world = sharded.world()}));
    for (const auto& [name, tensor] : net.parameters()) {
      elements += static_cast<std::size_t>(tensor.numel());
      most_uneven += 1024;
    }
  }
  void backward(const Tensor& loss) const { precision->backward(loss); }
  void step() { test::expect_applied(precision->step()); }

  nn::Sequential net;
  parallel::ShardedDataParallel sharded;
  optim::FusedAdam optimizer;
  std::optional<amp::Amp> precision;
  std::size_t elements = 0, most_uneven = 0;
};

nn::Sequential two_layers() {
  return nn::Sequential(nn::Linear(301, 407), nn::Linear(407, 299));
}

nn::Sequential eight_layers() {
  nn::Sequential net;
  for (int i = 0; i < 8; ++i) net.add(nn::Linear(301, 301));
  return net;
}

// Not before a backward either, while weights are f32 still.
TEST(GradientMemory, IsNotTakenForTheWhole) {
  test::run_ranks(2, [](parallel::ProcessGroup& group) {
    nn::Sequential net = two_layers();
    const Device device = core::default_device();
    const auto peak = [&] { return core::memory_stats(device).peak_of(MemoryCategory::gradients); };
    {
      core::reset_peak_memory(device);
      const parallel::ShardedDataParallel sharded(net, group, kGradientsInParts);
      const optim::FusedAdam optimizer(net.parameters());
      EXPECT_EQ(peak(), 0U);
    }
    const parallel::DistributedDataParallel plain(net, group);
    EXPECT_GT(peak(), 0U);
  });
}

// 2 n / N bytes once the backward is over, where DistributedDataParallel keeps 2 n.
TEST(GradientMemory, IsWhatTheFormulaSays) {
  test::run_ranks(3, [](parallel::ProcessGroup& group) {
    DividedLayers training(two_layers(), group, kGradientsInParts);
    const std::size_t elements = training.elements, block = training.most_uneven;
    const auto gradients = [] { return held(MemoryCategory::gradients); };
    const auto backward = [&] {
      training.backward(autograd::mse_loss(training.sharded(Tensor::full({4, 301}, 0.1)),
                                           Tensor::full({4, 299}, 0.2)));
    };
    for (int step = 0; step < 3; ++step) {
      backward();
      EXPECT_GE(gradients(), 2 * elements / 3 - 2 * block);
      EXPECT_LE(gradients(), 2 * elements / 3 + 2 * block);
      training.step();
      EXPECT_EQ(gradients(), 0U);
    }
    for (int step = 0; step < 3; ++step) {
      backward();
      backward();  // the first average waits in f32
      EXPECT_LE(gradients(), (2 + 4) * elements / 3 + (2 + 4) * block);
      training.step();
      EXPECT_LE(gradients(), 4 * elements / 3 + 4 * block);  // the sums' memory serves again
    }
  });
}

// 16 n / N bytes between steps; beside them, in a step, the unit at work and those that are fetched
// meanwhile: not one more, and not one less.
TEST(WeightMemory, IsWhatTheFormulaSays) {
  struct Form {
    int prefetch;
    std::int64_t most_gathered;
    std::size_t units;  // that are whole or on their way
  };
  constexpr std::int64_t kUnit = 301 * 301 + 301;
  test::run_ranks(3, [](parallel::ProcessGroup& group) {
    for (const Form form : {Form{1, 0, 2}, Form{0, 0, 1}, Form{2, 0, 3}, Form{7, 3 * kUnit, 3},
                            Form{7, 3 * kUnit - 1, 2}, Form{7, 1, 1}}) {
      SCOPED_TRACE(core::str(form.prefetch, " ahead, at most ", form.most_gathered));
      DividedLayers training(
          eight_layers(), group,
          stage_3({.prefetch = form.prefetch, .most_gathered = form.most_gathered}));
      const std::size_t elements = training.elements, block = training.most_uneven;
      const std::size_t units = form.units * elements / 8;
      const auto expect_parts = [&](std::size_t bytes, MemoryCategory category) {
        EXPECT_GE(held(category), bytes * elements / 3 - bytes * block);
        EXPECT_LE(held(category), bytes * elements / 3 + bytes * block);
      };
      for (int step = 0; step < 3; ++step) {
        core::reset_peak_memory(core::default_device());
        training.backward(loss_of(training.sharded(inputs(group, 1, 301))));
        expect_parts(2, MemoryCategory::parameters);
        expect_parts(2, MemoryCategory::gradients);
        const auto peak = core::memory_stats(core::default_device());
        const std::size_t of_weights = peak.peak_of(MemoryCategory::parameters);
        if (step > 0) {  // the order of the units is known
          EXPECT_LE(of_weights, 2 * elements / 3 + 2 * block + 2 * units);
          EXPECT_GE(of_weights, 2 * elements / 3 - 2 * block + 2 * units);
        }
        training.step();
        expect_parts(2, MemoryCategory::parameters);
        expect_parts(12, MemoryCategory::optimizer_state);
        EXPECT_EQ(held(MemoryCategory::gradients), 0U);
      }
    }
  });
}

// Between a forward and the backward 2 n / reshard_within bytes more.
TEST(WeightMemory, AfterAForwardIsThatOfTheGroupsParts) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "of CPUs";
  test::run_ranks(4, [](parallel::ProcessGroup& group) {
    DividedLayers training(eight_layers(), group, stage_3({.reshard_within = 2}));
    const std::size_t elements = training.elements;
    const auto expect_held = [&](std::size_t bytes, const char* when) {
      SCOPED_TRACE(when);
      EXPECT_NEAR(held(MemoryCategory::parameters), bytes, 2.0 * training.most_uneven);
    };
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = loss_of(training.sharded(inputs(group, 1, 301)));
      expect_held(2 * elements / 4 + 2 * elements / 2, "after the forward");
      {
        const autograd::NoGradGuard no_grad;
        (void)training.sharded(inputs(group, 2, 301));
      }
      expect_held(2 * elements / 4 + 2 * elements / 2, "after an evaluation");
      training.backward(loss);
      expect_held(2 * elements / 4, "after the backward");
      (void)training.sharded(inputs(group, 3, 301));  // has no backward
      training.step();
      expect_held(2 * elements / 4, "after the step");
    }
  });
}

}  // namespace
}  // namespace cairn
