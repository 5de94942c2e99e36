// What temperature() is made of, for tests.
#pragma once

#include <optional>
#include <string>

namespace cairn::core {

/// Of a folder as /sys/class/hwmon.
std::optional<double> cpu_temperature(const std::string& hwmon);
/// Of the GPU at that place of the PCI bus, "0000:41:00.0".
std::optional<double> gpu_temperature(const std::string& place);

}  // namespace cairn::core
