// ShardedOptimizerStates: trainers with arrays of their own divide masters and moments.
#include "cairn/parallel/sharded_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <optional>

#include "cairn/amp/scaled_step.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/arena.h"
#include "cairn/optim/lamb.h"
#include "cairn/parallel/reducer.h"
#include "parallel/ranks.h"
#include "support/expect_error.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn {
namespace {

using test::expect_error;

/// All weights one after another, and all gradients: what the optimizer sees is the whole of them,
/// or each tensor.
struct FlatArrays {
  static constexpr std::int64_t kSize = 6000;
  Tensor weights, gradients;
  NamedTensors parameters, names;

  FlatArrays(DType dtype, bool whole, Device device) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < kSize; ++i) values.push_back(std::sin(static_cast<double>(i)));
    weights = Tensor::from(values, {kSize}, dtype, device);
    gradients = Tensor::zeros({kSize}, dtype, device);
    const std::vector<std::int64_t> cuts =
        whole ? std::vector<std::int64_t>{0, kSize} : std::vector<std::int64_t>{0, 17, 2500, kSize};
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      const auto part = [&](const Tensor& all) {
        return Tensor::wrap(all.view().slice(0, cuts[i], cuts[i + 1]));
      };
      const std::string name = core::str("w", i);
      parameters.push_back(optim::wrap_parameter(name, part(weights), part(gradients)));
      names.push_back({name, part(gradients)});
    }
  }
};

struct ArrayTrainer {
  FlatArrays flat;
  parallel::Reducer reducer;
  std::optional<parallel::ShardedOptimizerStates> sharded;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<amp::ScaledStep> scaled;
  std::unique_ptr<checkpointing::Tensors> weights;
  std::unique_ptr<checkpointing::TrainingState> state;

  ArrayTrainer(parallel::ProcessGroup& group, bool shard, DType dtype, bool whole,
               bool lamb = false)
      : flat(dtype, whole, core::default_device()), reducer(group) {
    reducer.register_gradients(flat.names);
    if (shard) sharded.emplace(group, flat.parameters);
    if (lamb)
      optimizer = std::make_unique<optim::FusedLAMB>(flat.parameters, optim::LambOptions{});
    else
      optimizer = std::make_unique<optim::FusedAdam>(
          flat.parameters, optim::AdamOptions{.lr = 1e-2, .weight_decay = 0.01});
    scaled = std::make_unique<amp::ScaledStep>(
        *optimizer, amp::LossScalerOptions{.init_scale = 1024.0}, reducer.world());
    weights = std::make_unique<checkpointing::Tensors>(flat.parameters);
    state = std::make_unique<checkpointing::TrainingState>(
        std::vector<checkpointing::TrainingState::Part>{
            {"model", *weights}, {"optimizer", *optimizer}, {"amp", *scaled}},
        reducer.world());
  }

  optim::StepResult step(const parallel::ProcessGroup& group, int number, bool overflow = false) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < FlatArrays::kSize; ++i)
      values.push_back(scaled->scale() * 8.0 *
                       std::cos(static_cast<double>(i * (number + 1) + group.rank())));
    if (overflow && group.rank() == 1) values[2400] = INFINITY;
    kernels::copy(Tensor::from(values, {FlatArrays::kSize}, flat.gradients.dtype()),
                  flat.gradients);
    for (std::size_t i = 0; i < flat.names.size(); ++i) reducer.mark_ready(i);
    reducer.wait();
    return scaled->step({.max_gradient_norm = 100.0});
  }
};

std::string folder_of_arrays(const char* name) {
  const auto path = std::filesystem::temp_directory_path() /
                    core::str("cairn-sharded-states-", name, "-", getpid());
  std::filesystem::remove_all(path);
  return path.string();
}

struct ArrayForm {
  DType dtype;
  bool whole, lamb;
};
constexpr ArrayForm kForms[] = {{DType::f32, true, false},  {DType::f32, false, false},
                                {DType::bf16, true, false}, {DType::bf16, false, true},
                                {DType::f16, false, false}, {DType::f16, true, true}};

TEST(ShardedStatesOfArrays, HaveTheBitsOfWholeOnes) {
  for (const int ranks : {2, 3}) {
    for (const ArrayForm& form : kForms) {
      SCOPED_TRACE(core::str(ranks, " ranks ", form.dtype, form.whole ? " flat" : " tensors",
                             form.lamb ? " lamb" : ""));
      test::run_threads(ranks, [&](parallel::ProcessGroup& group) {
        ArrayTrainer plain(group, false, form.dtype, form.whole, form.lamb);
        ArrayTrainer sharded(group, true, form.dtype, form.whole, form.lamb);
        for (int step = 0; step < 6; ++step) {
          const bool overflow = step == 2;
          EXPECT_EQ(plain.step(group, step, overflow).applied, !overflow);
          EXPECT_EQ(sharded.step(group, step, overflow).applied, !overflow);
          ASSERT_EQ(plain.flat.weights.to_vector(), sharded.flat.weights.to_vector()) << step;
        }
      });
    }
  }
}

double bytes_of_states() {
  return static_cast<double>(
      core::memory_stats(core::default_device()).of(core::MemoryCategory::optimizer_state));
}

// Ranks are threads of one process: on a CPU what all of them hold is counted.
TEST(ShardedStatesOfArrays, HoldTheirPartAlone) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool shard : {false, true}) {
      test::run_threads(3, [&](parallel::ProcessGroup& group) {
        const double before = bytes_of_states();
        group.barrier("all have counted");
        ArrayTrainer one(group, shard, dtype, true);
        test::expect_applied(one.step(group, 0));
        const auto own = core::even_part(FlatArrays::kSize, group.rank(), 3).size();
        std::int64_t elements = shard ? own : FlatArrays::kSize;
        if (core::default_device().is_cpu()) elements = (shard ? 1 : 3) * FlatArrays::kSize;
        group.barrier("all have stepped");
        EXPECT_NEAR(bytes_of_states() - before,
                    static_cast<double>((dtype == DType::f32 ? 8 : 12) * elements), 512);
        group.barrier("all have counted");
      });
    }
  }
}

TEST(ShardedStatesOfArrays, ResumeInAnyNumberOfRanks) {
  for (const bool whole : {true, false}) {
    const std::string dir = folder_of_arrays(whole ? "flat" : "tensors");
    test::run_threads(3, [&](parallel::ProcessGroup& group) {
      ArrayTrainer one(group, true, DType::bf16, whole);
      for (int step = 0; step < 3; ++step) test::expect_applied(one.step(group, step));
      one.state->save(dir, 3);
    });
    test::run_threads(2, [&](parallel::ProcessGroup& group) {
      ArrayTrainer sharded(group, true, DType::bf16, whole),
          plain(group, false, DType::bf16, whole);
      ASSERT_TRUE(sharded.state->resume_latest(dir));
      ASSERT_TRUE(plain.state->resume_latest(dir));
      for (int step = 3; step < 6; ++step) {
        test::expect_applied(sharded.step(group, step));
        test::expect_applied(plain.step(group, step));
        ASSERT_EQ(plain.flat.weights.to_vector(), sharded.flat.weights.to_vector()) << step;
      }
    });
    std::filesystem::remove_all(dir);
  }
}

TEST(ShardedStatesOfArrays, MayComeAfterTheOptimizer) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    ArrayTrainer plain(group, false, DType::bf16, false), late(group, false, DType::bf16, false);
    for (int step = 0; step < 4; ++step) {
      if (step == 2) late.sharded.emplace(group, late.flat.parameters);
      test::expect_applied(plain.step(group, step));
      test::expect_applied(late.step(group, step));
      ASSERT_EQ(plain.flat.weights.to_vector(), late.flat.weights.to_vector()) << step;
    }
  });
}

TEST(ShardedStatesOfArrays, TakeNoPartOfAnotherRank) {
  std::vector<StateDict> states(3);
  test::run_threads(3, [&](parallel::ProcessGroup& group) {
    ArrayTrainer one(group, true, DType::bf16, true);
    test::expect_applied(one.step(group, 0));
    const auto rank = static_cast<std::size_t>(group.rank());
    states[rank] = one.weights->state_dict();
    one.weights->load_state_dict(states[rank]);
    group.barrier("all have saved");
    expect_error<core::DataError>([&] { one.weights->load_state_dict(states[(rank + 1) % 3]); },
                                  {"'w0': expected bf16 [6000], got f32 [", "] of [6000] from "});
    test::expect_applied(one.step(group, 1));
    group.barrier("all have loaded");
  });
}

TEST(ShardedStatesOfArrays, EndAfterTheOptimizersLastStep) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    ArrayTrainer one(group, true, DType::f32, true);
    test::expect_applied(one.step(group, 0));
    one.sharded.reset();
    expect_error<core::InvalidArgument>([&] { (void)one.step(group, 1); }, {"w0"});
  });
}

TEST(ShardedStatesOfArrays, RefuseWhatTheyCannotDivide) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    const FlatArrays flat(DType::f32, false, core::default_device());
    const parallel::ShardedOptimizerStates first(group, {flat.parameters[0]});
    expect_error<core::InvalidArgument>(
        [&] { parallel::ShardedOptimizerStates(group, flat.parameters); },
        {"parameters that nothing else divides or reduces, got 'w0'"});
    expect_error<core::InvalidArgument>(
        [&] {
          parallel::ShardedOptimizerStates(
              group, {flat.parameters[static_cast<std::size_t>(1 + group.rank())]});
        },
        {"expected the same parameters on every rank", "w1", "w2"});
    expect_error<core::InvalidArgument>(
        [&] {
          parallel::ShardedOptimizerStates(group, {{"loose", Tensor::zeros({4})}});
        },
        {"of the trainer's own", "'loose'"});
  });
}

}  // namespace
}  // namespace cairn
