// Conversions of dtype: the differentiable op, and what a cast policy does with an op's inputs.
#pragma once

#include <span>

#include "cairn/autograd/function.h"

namespace cairn::autograd {

Tensor cast(const Tensor& x, DType dtype);  // x itself where it has the dtype

/// Converts the inputs as the op's policy and the thread's autocast say; counts in the event.
void cast_inputs(const OpInfo& info, std::span<Tensor> inputs, OpEvent& event);

}  // namespace cairn::autograd
