// Tensors cross between libtorch and Cairn without a copy, both ways.
//
//   Tensor x = libtorch::to_cairn(theirs);         // shares the memory, keeps `theirs` alive
//   torch::Tensor y = libtorch::to_torch(ours);    // the same the other way
//
// Shape, strides, dtype and device stay. Neither carries a gradient or a graph along.
//
// From the first CUDA tensor that crosses on, Cairn's current stream of a CUDA device is libtorch's
// current one, in every thread and wherever no core::StreamGuard says otherwise: neither waits for
// the other.
#pragma once

#include <torch/types.h>

#include "cairn/core/tensor.h"

namespace cairn::libtorch {

/// Throws InvalidArgument for an undefined tensor, for one without strides (sparse, quantised), and
/// for dtypes and devices that Cairn lacks.
Tensor to_cairn(const torch::Tensor& x);
/// Throws InvalidArgument for an undefined tensor. cpu:i is libtorch's one CPU.
torch::Tensor to_torch(const Tensor& x);

DType to_cairn(at::ScalarType dtype);
at::ScalarType to_torch(DType dtype);
core::Device to_cairn(at::Device device);
at::Device to_torch(core::Device device);

}  // namespace cairn::libtorch
