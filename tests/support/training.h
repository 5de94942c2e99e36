// What the tests of optimizers and of amp share: values of weights, optimizers by their rule, and
// what is said on stderr.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/optim/optimizer.h"
#include "support/master.h"
#include "support/message_of.h"
#include "support/state.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::test {

using Values = std::vector<double>;

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

inline Values values(const Tensor& tensor) {
  return tensor.to_vector<double>();
}
inline std::vector<Values> values(const NamedTensors& tensors) {
  std::vector<Values> all;
  for (const NamedTensor& one : tensors) all.push_back(values(one.tensor));
  return all;
}

/// Of the master where there is one.
inline Values exact(const Tensor& weight) {
  return values(kernels::master_value(weight));
}
inline std::vector<Values> exact(const NamedTensors& weights) {
  std::vector<Values> all;
  for (const NamedTensor& one : weights) all.push_back(exact(one.tensor));
  return all;
}

inline double norm_of(const Values& values, double type = 2.0) {
  double sum = 0.0;
  for (const double x : values) {
    sum = type == kInf ? std::max(sum, std::abs(x)) : sum + std::pow(std::abs(x), type);
  }
  return type == kInf ? sum : std::pow(sum, 1 / type);
}

inline Values joined(const std::vector<Values>& parts) {
  Values all;
  for (const Values& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Each less this much.
inline Values less(Values values, double by) {
  for (double& value : values) value -= by;
  return values;
}

/// Everything that steps change: weights, masters, the optimizer's state.
inline std::vector<Values> everything(const NamedTensors& parameters,
                                      const optim::Optimizer& optimizer) {
  std::vector<Values> all = values(parameters);
  for (const auto& [name, tensor] : parameters) {
    const auto* master = kernels::MasterWeight::of(tensor);
    if (master != nullptr) all.push_back(values(master->tensor()));
  }
  for (const auto& [name, state] : flat(optimizer.state_dict())) {
    if (name != "f32_gradients") all.push_back(state);  // how the arena lies
  }
  return all;
}

inline std::size_t bytes_of(core::MemoryCategory category) {
  return core::memory_stats(core::default_device()).of(category);
}

/// Makes optimizers of this rule from parameters, or from groups of them.
template <class Optimizer, class Options>
auto maker(const Options& options) {
  return [options](auto given) -> std::unique_ptr<optim::Optimizer> {
    return std::make_unique<Optimizer>(std::move(given), options);
  };
}

template <class F>
std::string said_by(F&& f) {
  testing::internal::CaptureStderr();
  f();
  return testing::internal::GetCapturedStderr();
}

}  // namespace cairn::test
