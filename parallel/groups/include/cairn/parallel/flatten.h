// Flat buffers: many tensors as one, so that one collective serves them all.
//
//   Tensor flat = parallel::flatten(all_gradients);
//   group.all_reduce(flat);
//   parallel::unflatten(flat, all_gradients);
#pragma once

#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// The elements of dense tensors of one dtype and device, each in its order in memory, one tensor
/// after another: [sum of the sizes], of that dtype. Throws InvalidArgument for an empty list,
/// gaps, or several dtypes or devices.
Tensor flatten(const std::vector<TensorView>& tensors);
/// The same into [sum of the sizes] of any floating dtype (any dtype, where it is the tensors'):
/// flat = scale * x.
void flatten(const std::vector<TensorView>& tensors, const TensorView& flat, double scale = 1.0);
/// The way back: each tensor = scale * its part of flat.
void unflatten(const TensorView& flat, const std::vector<TensorView>& tensors, double scale = 1.0);

/// Gives every rank root's values of these tensors: parameters, buffers, masters; in flat buffers
/// of up to 25 MiB, one dtype and device each. A collective: every rank hands in the same list.
/// Done in the current streams' order.
void broadcast_parameters(const NamedTensors& tensors, const ProcessGroup& group, int root = 0);

}  // namespace cairn::parallel
