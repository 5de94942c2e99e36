// Trains by a choice of plan_training, to see the peak that it really takes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/data_parallel.h"

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

/// A model that runs as a choice says, on so many devices from the default one on.
class PlannedModel {
 public:
  PlannedModel(nn::Sequential& model, const TrainingChoice& choice, int devices)
      : model_(model), choice_(choice) {
    const Device first = core::default_device();
    for (int i = 0; i < devices; ++i) devices_.push_back({first.type, first.index + i});
    if (devices > 1) replicas_.emplace(model, devices_);
  }

  Tensor loss(const Tensor& x, const Tensor& target) {
    if (!replicas_) return choice_.loss(model_, x, target);
    return choice_.balanced_loss ? balanced(x, target) : gathered(x, target);
  }
  const std::vector<Device>& devices() const { return devices_; }

 private:
  static nn::Sequential& chain(nn::Module& replica) {
    return dynamic_cast<nn::Sequential&>(replica);
  }
  Tensor gathered(const Tensor& x, const Tensor& target) {
    const auto output = [&](nn::Module& replica, const std::vector<Tensor>& part) {
      return choice_.output(chain(replica), part[0]);
    };
    const Tensor y = parallel::gather(replicas_->apply({x}, output), devices_[0]);
    return choice_.loss_function(y, target);
  }
  Tensor balanced(const Tensor& x, const Tensor& target) {
    const auto samples = static_cast<double>(x.size(0));
    const std::vector<Tensor> shares =
        replicas_->apply({x, target}, [&](nn::Module& replica, const std::vector<Tensor>& part) {
          const Tensor loss = choice_.loss(chain(replica), part[0], part[1]);
          return autograd::affine(loss, static_cast<double>(part[0].size(0)) / samples, 0);
        });
    Tensor sum;
    for (const Tensor& share : shares) {
      const Tensor here = autograd::to(share, devices_[0]);
      sum = sum.defined() ? autograd::add(sum, here) : here;
    }
    return sum;
  }

  nn::Sequential& model_;
  const TrainingChoice& choice_;
  std::vector<Device> devices_;
  std::optional<parallel::DataParallelModel> replicas_;
};

/// The fullest device's peak in the second step.
inline std::size_t trained_peak(Task& task, const TrainingChoice& choice, int moments = 2,
                                int devices = 1) {
  const std::unique_ptr<optim::Optimizer> owner = optimizer_with(moments, task.model.parameters());
  optim::Optimizer& optimizer = *owner;
  if (choice.compact_state) {
    const bool remainder = choice.precision.half_weights && choice.precision.half == DType::bf16;
    optimizer.set_state_options(
        {DType::bf16, remainder ? optim::MasterStorage::remainder : optim::MasterStorage::f32});
  }
  if (choice.states_on_host) optimizer.set_state_options({.on_host = true});
  amp::Amp precision = amp::initialize(task.model, optimizer, options_of(choice));
  if (choice.micro_batches > 1) optim::GradientArena::attach(task.model.parameters(), true);
  PlannedModel model(task.model, choice, devices);
  const double weight = 1.0 / static_cast<double>(choice.micro_batches);
  for (int step = 0; step < 2; ++step) {
    for (const Device device : model.devices()) core::reset_peak_memory(device);
    for (std::int64_t i = 0; i < choice.micro_batches; ++i) {
      const std::int64_t begin = i * choice.micro_batch;
      const Tensor x = part_of(task.batch.x, begin, choice.micro_batch);
      const Tensor target = part_of(task.batch.target, begin, choice.micro_batch);
      precision.backward(model.loss(x, target), {.weight = weight});
    }
    EXPECT_TRUE(precision.step().applied) << choice.describe();
  }
  std::size_t peak = 0;
  for (const Device device : model.devices()) {
    peak = std::max(peak, core::memory_stats(device).peak_total);
  }
  precision.release();
  return peak;
}

}  // namespace cairn::checkpointing::training_plans
