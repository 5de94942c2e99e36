// Models and references of the tests of data parallelism: what a single process computes without
// any of it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/parallel/distributed.h"
#include "support/tensors.h"

namespace cairn::test {

constexpr std::int64_t kWidth = 6, kRows = 3;

inline Tensor normal(const Shape& shape, std::uint64_t seed, DType dtype = DType::f32) {
  return Tensor::from(normal_tensor(shape, seed).to_vector<float>(), shape, dtype);
}

/// Of all parameters, one after another.
inline std::vector<double> weights_of(const nn::Module& model) {
  std::vector<double> all;
  for (const auto& [name, tensor] : model.parameters()) {
    const auto own = tensor.to_vector<double>();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

/// Layers one after another, some of which a loss may leave out; layer 0 may be used twice.
class Tower : public nn::Module {
 public:
  explicit Tower(int layers, std::uint64_t seed = 7) {
    manual_seed(seed);
    for (int i = 0; i < layers; ++i) add_layer();
  }
  void add_layer() {
    layers_.push_back(add_module("l" + std::to_string(layers_.size()), nn::Linear(kWidth, kWidth)));
  }
  std::string kind() const override { return "Tower"; }
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if ((reach & (1u << i)) != 0) y = autograd::tanh((*layers_[i])(y));
    }
    if (twice && (reach & 1u) != 0) y = (*layers_[0])(y);
    return y;
  }
  std::size_t size() const { return layers_.size(); }
  nn::Linear& layer(std::size_t i) { return *layers_[i]; }
  unsigned reach = ~0u;
  bool twice = false;

 private:
  std::vector<std::shared_ptr<nn::Linear>> layers_;
};

template <class Model>
Tensor loss_of(Model& model, std::uint64_t seed, DType dtype = DType::f32,
               std::int64_t rows = kRows) {
  const Tensor x = normal({rows, kWidth}, 1000 + seed, dtype);
  const Tensor y = normal({rows, kWidth}, 5000 + seed, dtype);
  return autograd::mse_loss(model(x), y);
}

using Values = std::vector<double>;
using Gradients = std::map<std::string, Values>;  // of the parameters that have one

inline Gradients gradients_of(const nn::Module& model) {
  Gradients all;
  for (const auto& [name, tensor] : model.parameters()) {
    if (tensor.grad().defined()) all[name] = tensor.grad().to_vector<double>();
  }
  return all;
}

/// sum += weight * part.
inline void add(Gradients& sum, const Gradients& part, double weight) {
  for (const auto& [name, values] : part) {
    Values& into = sum[name];
    into.resize(values.size(), 0.0);
    for (std::size_t i = 0; i < values.size(); ++i) into[i] += weight * values[i];
  }
}

/// "" where they agree.
inline std::string difference(const Gradients& got, const Gradients& expected, double tolerance) {
  for (const auto& [name, values] : expected) {
    const auto found = got.find(name);
    if (found == got.end()) return "no gradient of " + name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double error = std::abs(found->second[i] - values[i]);
      if (!(error <= tolerance * (1.0 + std::abs(values[i]))))
        return core::str(name, "[", i, "] is ", found->second[i], ", expected ", values[i]);
    }
  }
  for (const auto& [name, values] : got) {
    if (!expected.contains(name)) return "a gradient of " + name + " that nobody made";
  }
  return "";
}

inline std::string bytes_of(const Gradients& gradients) {
  std::string bytes;
  for (const auto& [name, values] : gradients)
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  return bytes;
}

}  // namespace cairn::test
