// How hot a device is.
#pragma once

#include <optional>

#include "cairn/core/device.h"

namespace cairn::core {

/// Degrees Celsius: of a CPU the highest that its own sensors tell (Linux's hwmon: coretemp,
/// k10temp, zenpower, cpu_thermal), of a GPU what NVIDIA's management library does. None where
/// there is no sensor that may be read, as in most virtual machines. Does not throw.
std::optional<double> temperature(Device device);

}  // namespace cairn::core
