#pragma once

#include "cairn/core/tensor.h"

namespace cairn::checkpointing {

/// The values, row-major, on cpu:0: the tensor itself where it is that already. Waits for the
/// device.
Tensor on_host(const Tensor& x);

}  // namespace cairn::checkpointing
