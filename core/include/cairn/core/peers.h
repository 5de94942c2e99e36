// Which devices reach each other's memory.
#pragma once

#include "cairn/core/device.h"

namespace cairn::core {

/// Whether kernels of `device` may read and write memory of `other`: among CPU devices, and where
/// one GPU has access to another's memory. The first question enables that.
bool reaches(Device device, Device other);

}  // namespace cairn::core
