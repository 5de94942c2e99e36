// What the optimizer tests share.
#pragma once

#include <gtest/gtest.h>
#include "support/master.h"

#include <string>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/optimizer.h"
#include "support/state.h"
#include "support/tensors.h"

namespace cairn::optim {

using test::snapshot;

/// A leaf with values in [-1, 1).
inline NamedTensor make_parameter(const std::string& name, const Shape& shape, std::uint64_t seed,
                                  DType dtype = DType::f32,
                                  Device device = core::default_device()) {
  Tensor tensor = test::random_tensor(shape, dtype, device, seed);
  tensor.set_requires_grad(true);
  return {name, tensor};
}

/// What a backward pass does with a leaf's gradient: into its slot where it has one.
inline void write_gradient(const Tensor& parameter, const std::vector<double>& values) {
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

inline std::vector<double> values(const Tensor& tensor) {
  return tensor.to_vector<double>();
}

}  // namespace cairn::optim
