// What the amp tests share: a small classifier, its data, and comparison of whole trainings.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optimizer.h"
#include "support/master.h"
#include "support/state.h"
#include "support/tensors.h"

namespace cairn::amp {

using test::snapshot;

/// Linear 8 -> 16, batch norm, ReLU, Linear 16 -> 4; the same values for the same seed.
inline nn::Sequential make_model(std::uint64_t seed = 1) {
  manual_seed(seed);
  return nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Linear(16, 4));
}

struct Batch {
  Tensor x;       // [32, 8] f32
  Tensor labels;  // [32] i64
};

/// Labels that follow from x, so that the loss can fall.
inline Batch make_batch(std::uint64_t seed) {
  const std::vector<double> x = test::random_values(32 * 8, 1000 + seed, -2.0, 2.0);
  std::vector<std::int64_t> labels(32);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const double* row = &x[8 * i];
    labels[i] = (row[0] + row[1] > row[2] ? 1 : 0) + (row[3] > row[4] * row[5] ? 2 : 0);
  }
  return {Tensor::from(x, {32, 8}, DType::f32), Tensor::from(labels, {32})};
}

inline Tensor loss_of(nn::Module& model, const Batch& batch) {
  return autograd::cross_entropy(model(batch.x), batch.labels);
}

inline optim::StepResult train_step(nn::Module& model, Amp& precision, const Batch& batch) {
  precision.backward(loss_of(model, batch));
  return precision.step();
}

inline std::vector<double> values(const Tensor& tensor) {
  return tensor.to_vector<double>();
}

/// Everything that training changes: parameters, masters, buffers, moments.
inline std::vector<std::vector<double>> everything(nn::Module& model,
                                                   const optim::Optimizer& optimizer) {
  std::vector<std::vector<double>> all;
  for (const auto& [name, tensor] : model.parameters()) {
    all.push_back(values(tensor));
    if (kernels::MasterWeight::exists(tensor))
      all.push_back(values(kernels::MasterWeight::of(tensor)->tensor()));
  }
  for (const auto& [name, tensor] : model.buffers()) all.push_back(values(tensor));
  const auto collect = [&](const auto& self, const StateDict& state) -> void {
    for (const auto& [key, value] : state) {
      if (const auto* tensor = std::get_if<Tensor>(&value)) all.push_back(values(*tensor));
      if (const auto* child = std::get_if<StateDict>(&value)) self(self, *child);
    }
  };
  collect(collect, optimizer.state_dict());
  return all;
}

inline const OptLevel kLevels[] = {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3};
inline const DType kHalves[] = {DType::f16, DType::bf16};

}  // namespace cairn::amp
