// Conversions of dtype: the differentiable op, and what a cast policy does with an op's inputs.
#pragma once

#include <span>

#include "cairn/autograd/function.h"

namespace cairn::autograd {

Tensor cast(const Tensor& x, DType dtype);  // x itself where it has the dtype

/// The same, through the cast cache for parameters. Sets hit where the copy was there already.
Tensor cached_cast(const Tensor& x, DType dtype, bool* hit = nullptr);

/// Converts the inputs as the op's policy and the thread's autocast say; tells the event, if any.
/// Throws core::Unsupported for half inputs of a banned op.
void cast_inputs(const OpInfo& info, std::span<Tensor> inputs, OpEvent* event);

}  // namespace cairn::autograd
