#pragma once

#include "cairn/core/tensor.h"

namespace cairn::checkpointing {

/// Waits for what this thread has queued on the tensor's device.
void wait_for_device(const Tensor& x);

/// The values, row-major, on cpu:0: the tensor itself where it is that already. Waits for the
/// device.
Tensor on_host(const Tensor& x);

}  // namespace cairn::checkpointing
