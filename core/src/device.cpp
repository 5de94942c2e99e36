#include "cairn/core/device.h"

#include <charconv>
#include <ostream>

#include "cairn/core/error.h"
#include "cuda_interface.h"
#include "environment.h"

namespace cairn::core {

namespace {

constexpr int kMaxCpuDevices = 64;

int cpu_device_count() {
  static const int count = static_cast<int>(
      environment_integer("CAIRN_CPU_DEVICES", /*fallback=*/1, /*low=*/1, kMaxCpuDevices));
  return count;
}

std::string range_of(DeviceType type) {
  const int count = device_count(type);
  if (count == 0) return "";
  std::string first = to_string({type, 0});
  if (count == 1) return first;
  return first + (count == 2 ? ", " : " ... ") + to_string({type, count - 1});
}

std::string existing_devices() {
  const std::string cuda = range_of(DeviceType::cuda);
  return range_of(DeviceType::cpu) + (cuda.empty() ? "" : ", " + cuda);
}

[[noreturn]] void fail_unknown(std::string_view text, std::string_view hint) {
  fail("device", "expected one of ", existing_devices(), ", got \"", text, "\"", hint);
}

}  // namespace

int device_count(DeviceType type) {
  return type == DeviceType::cpu ? cpu_device_count() : cuda::device_count();
}

bool cuda_available() {
  return device_count(DeviceType::cuda) > 0;
}

void check_exists(Device device) {
  if (device.index >= 0 && device.index < device_count(device.type)) return;
  if (device.is_cpu()) {
    fail_unknown(to_string(device), " (CAIRN_CPU_DEVICES sets how many CPU devices there are)");
  }
  fail_unknown(to_string(device), cuda::absence_hint());
}

namespace {
thread_local Device current_default;
}

Device default_device() {
  return current_default;
}

DefaultDeviceGuard::DefaultDeviceGuard(Device device) : previous_(current_default) {
  check_exists(device);
  current_default = device;
}

DefaultDeviceGuard::~DefaultDeviceGuard() {
  current_default = previous_;
}

Device Device::parse(std::string_view text) {
  Device device;
  const std::size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  if (kind == "cuda") {
    device.type = DeviceType::cuda;
  } else if (kind != "cpu") {
    fail_unknown(text, "");
  }
  if (colon != std::string_view::npos) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), device.index);
    if (error != std::errc{} || end != digits.data() + digits.size()) fail_unknown(text, "");
  }
  check_exists(device);
  return device;
}

std::string to_string(Device device) {
  return (device.is_cpu() ? "cpu:" : "cuda:") + std::to_string(device.index);
}

std::ostream& operator<<(std::ostream& out, Device device) {
  return out << to_string(device);
}

}  // namespace cairn::core
