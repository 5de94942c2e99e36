// Whether a parameter is trained.
#pragma once

#include "cairn/core/tensor.h"

namespace cairn::gradients {

/// An optimizer that lives has it.
bool has_optimizer(const Tensor& parameter);

}  // namespace cairn::gradients
