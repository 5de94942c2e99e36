// What tests of activations share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "support/tensors.h"

namespace cairn::checkpointing::activations {

using Values = std::vector<std::vector<double>>;

inline Tensor leaf(const Shape& shape, std::uint64_t seed) {
  Tensor x = test::normal_tensor(shape, seed);
  return x.set_requires_grad(true);
}

inline std::size_t live() {
  return core::memory_stats(core::default_device()).current_total;
}

inline Values gradients_of(nn::Sequential& model, const std::function<Tensor()>& forward) {
  model.clear_grad();
  autograd::backward(autograd::mean(forward()));
  Values all;
  for (const auto& p : model.parameters()) all.push_back(p.tensor.grad().to_vector());
  return all;
}

}  // namespace cairn::checkpointing::activations
