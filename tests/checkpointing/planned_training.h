// Trains by a choice of plan_training, to see the peak that it really takes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"

namespace cairn::checkpointing::training_plans {

inline Tensor random_classes(const Shape& shape, std::int64_t classes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> values(static_cast<std::size_t>(shape.numel()));
  for (std::int64_t& value : values) value = static_cast<std::int64_t>(random() % classes);
  return Tensor::from(values, shape, DType::i64, core::default_device());
}

struct Task {
  nn::Sequential model;
  TrainingBatch batch;
};

inline Tensor part_of(const Tensor& x, std::int64_t begin, std::int64_t size) {
  return x.alias(x.view().slice(0, begin, std::min(begin + size, x.size(0))));
}

inline amp::Options options_of(const TrainingChoice& choice) {
  const Precision& precision = choice.precision;
  amp::Options options{.opt_level = amp::OptLevel::O0};
  if (precision.autocast) options.opt_level = amp::OptLevel::O1;
  if (precision.half_weights) options.opt_level = amp::OptLevel::O2;
  if (options.opt_level != amp::OptLevel::O0) options.half_dtype = precision.half;
  return options;
}

/// One that keeps so many moments of each parameter.
inline std::unique_ptr<optim::Optimizer> optimizer_with(int moments,
                                                        const NamedTensors& parameters) {
  if (moments == 2) {
    return std::make_unique<optim::FusedAdam>(parameters, optim::AdamOptions{.lr = 1e-3});
  }
  return std::make_unique<optim::FusedSGD>(
      parameters, optim::SgdOptions{.lr = 1e-3, .momentum = moments == 1 ? 0.9 : 0.0});
}

/// The device's peak in the second step.
inline std::size_t trained_peak(Task& task, const TrainingChoice& choice, int moments = 2) {
  const std::unique_ptr<optim::Optimizer> owner = optimizer_with(moments, task.model.parameters());
  optim::Optimizer& optimizer = *owner;
  if (choice.compact_state) {
    const bool remainder = choice.precision.half_weights && choice.precision.half == DType::bf16;
    optimizer.set_state_options(
        {DType::bf16, remainder ? optim::MasterStorage::remainder : optim::MasterStorage::f32});
  }
  amp::Amp precision = amp::initialize(task.model, optimizer, options_of(choice));
  if (choice.micro_batches > 1) optimizer.arenas()[0]->use_f32_slots();
  const double weight = 1.0 / static_cast<double>(choice.micro_batches);
  std::size_t peak = 0;
  for (int step = 0; step < 2; ++step) {
    core::reset_peak_memory(task.batch.x.device());
    for (std::int64_t i = 0; i < choice.micro_batches; ++i) {
      const std::int64_t begin = i * choice.micro_batch;
      const Tensor x = part_of(task.batch.x, begin, choice.micro_batch);
      const Tensor target = part_of(task.batch.target, begin, choice.micro_batch);
      precision.backward(choice.loss(task.model, x, target), {.weight = weight});
    }
    EXPECT_TRUE(precision.step().applied) << choice.levers();
    peak = core::memory_stats(task.batch.x.device()).peak_total;
  }
  precision.release();
  return peak;
}

}  // namespace cairn::checkpointing::training_plans
