// States of optimizers between Cairn's form (by names) and torch.optim's (by index).
#pragma once

#include "cairn/core/state_dict.h"

namespace cairn::tools {

bool is_own_optimizer(const StateDict& state);
bool is_torch_optimizer(const StateDict& state);

/// `model`: the state of the model whose parameters it updates. Both throw core::DataError or
/// core::Unsupported for an optimizer that only one side has, and for several parameter groups
/// where it is not certain which parameter is in which.
StateDict torch_from_own(const StateDict& own, const StateDict& model);
StateDict own_from_torch(const StateDict& torch, const StateDict& model);

}  // namespace cairn::tools
