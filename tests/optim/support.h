// What the optimizer tests share.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/optim/optim.h"
#include "support/training.h"

namespace cairn::optim {

using test::exact, test::expect_applied, test::kInf, test::kNaN, test::message_of, test::snapshot,
    test::Values, test::values;

/// A leaf with values in [-1, 1).
inline NamedTensor make_parameter(const std::string& name, const Shape& shape, std::uint64_t seed,
                                  DType dtype = DType::f32,
                                  Device device = core::default_device()) {
  Tensor tensor = test::random_tensor(shape, dtype, device, seed);
  tensor.set_requires_grad(true);
  return {name, tensor};
}

/// What a backward pass does with a leaf's gradient: into its slot where it has one.
inline void write_gradient(const Tensor& parameter, const Values& values) {
  core::GradientSlot& slot = parameter.gradient_slot();
  const Tensor gradient = Tensor::from(values, parameter.shape(), DType::f32, parameter.device());
  if (!slot.memory().defined()) slot.set_own(Tensor::empty_like(parameter));
  kernels::copy(gradient, slot.memory());
  slot.mark_written();
}

inline void write_gradients(const NamedTensors& parameters, std::uint64_t seed,
                            double scale = 1.0) {
  for (const NamedTensor& parameter : parameters) {
    write_gradient(parameter.tensor,
                   test::random_values(parameter.tensor.numel(), seed++, -scale, scale));
  }
}

inline std::vector<Values> gradients_of(const NamedTensors& parameters) {
  std::vector<Values> all;
  for (const auto& [name, tensor] : parameters) all.push_back(values(tensor.grad()));
  return all;
}

/// A step with such gradients, which must be applied.
inline void train(Optimizer& optimizer, const NamedTensors& parameters, std::uint64_t seed,
                  double scale = 1.0) {
  write_gradients(parameters, seed, scale);
  expect_applied(optimizer.step());
}

inline Values rounded(const Values& exact, DType dtype) {
  return values(Tensor::from(exact, {static_cast<std::int64_t>(exact.size())}, dtype));
}

/// Weights and masters of others of the same shapes.
inline void copy_values(const NamedTensors& from, const NamedTensors& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    kernels::copy(from[i].tensor, to[i].tensor);
    if (kernels::MasterWeight::exists(from[i].tensor)) {
      kernels::MasterWeight::assign(to[i].tensor, kernels::master_value(from[i].tensor));
    }
  }
}

/// The exact values, of masters where there are some.
inline void expect_weights(const NamedTensors& parameters, const std::vector<Values>& expected,
                           double relative, double absolute) {
  ASSERT_EQ(parameters.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    test::expect_close(exact(tensor), expected[i], relative, absolute, name);
  }
}

inline Tensor moment_of(const Optimizer& optimizer, const std::string& parameter,
                        const std::string& moment = "exp_avg") {
  return optimizer.state_dict().dict("state").dict(parameter).tensor(moment);
}

struct Rule {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<ParameterGroup>)> make;
};

inline std::vector<Rule> rules() {
  using test::maker;
  return {{"Adam", maker<FusedAdam>(AdamOptions{})},
          {"Sgd", maker<FusedSGD>(SgdOptions{})},
          {"SgdMomentum", maker<FusedSGD>(SgdOptions{.momentum = 0.9})},
          {"Adagrad", maker<FusedAdagrad>(AdagradOptions{.lr_decay = 0.1})},
          {"RmsProp", maker<FusedRMSprop>(RmsPropOptions{})},
          {"RmsPropMomentum", maker<FusedRMSprop>(RmsPropOptions{.momentum = 0.9})},
          {"NovoGrad", maker<FusedNovoGrad>(NovoGradOptions{})},
          {"NovoGradInf", maker<FusedNovoGrad>(NovoGradOptions{.norm_type = kInf})},
          {"Lamb", maker<FusedLAMB>(LambOptions{})}};
}

}  // namespace cairn::optim
