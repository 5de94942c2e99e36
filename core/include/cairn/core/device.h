// Devices: "cpu:0 ... cpu:N-1" and "cuda:0 ... cuda:N-1".
//
// CPU devices beyond cpu:0 share the processor but have their own allocator, statistics and
// capacity, so that multi-device and out-of-memory behaviour can be exercised anywhere.
// CAIRN_CPU_DEVICES sets how many exist (default 1).
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

namespace cairn::core {

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_cuda() const { return type == DeviceType::cuda; }
  bool operator==(const Device&) const = default;

  /// Reads "cpu", "cpu:1", "cuda" or "cuda:0". Throws InvalidArgument for other text, and for a
  /// device that this machine lacks; the message names those it has.
  static Device parse(std::string_view text);
};

std::string to_string(Device device);  // "cpu:0"
std::ostream& operator<<(std::ostream& out, Device device);

int device_count(DeviceType type);  // 0 for cuda where no toolkit, driver or GPU is found
bool cuda_available();              // device_count(DeviceType::cuda) > 0

/// Throws InvalidArgument where the device does not exist; the message names those that do.
void check_exists(Device device);

/// Where tensors are made, and with them modules, that are given no device: the innermost
/// DefaultDeviceGuard's of the calling thread, cpu:0 without one.
Device default_device();

class [[nodiscard]] DefaultDeviceGuard {
 public:
  explicit DefaultDeviceGuard(Device device);
  ~DefaultDeviceGuard();
  DefaultDeviceGuard(const DefaultDeviceGuard&) = delete;
  DefaultDeviceGuard& operator=(const DefaultDeviceGuard&) = delete;

 private:
  Device previous_;
};

}  // namespace cairn::core

namespace cairn {
using core::Device;
using core::DeviceType;
}  // namespace cairn
