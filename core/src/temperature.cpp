#include "cairn/core/temperature.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "cairn/core/error.h"
#include "cuda_interface.h"
#include "temperature.h"

namespace cairn::core {

namespace {

namespace fs = std::filesystem;

bool is_of_a_cpu(const fs::path& sensors) {
  constexpr std::array<std::string_view, 4> kNames{"coretemp", "k10temp", "zenpower",
                                                   "cpu_thermal"};
  std::string name;
  std::ifstream(sensors / "name") >> name;
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// The three calls of libnvidia-ml that are wanted, which the driver brings; its results are 0 for
/// success, its devices pointers.
class ManagementLibrary {
 public:
  ManagementLibrary() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    const auto begin = function<int()>("nvmlInit_v2");
    find_ = function<int(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    read_ = function<int(void*, int, unsigned*)>("nvmlDeviceGetTemperature");
    begun_ = begin != nullptr && find_ != nullptr && read_ != nullptr && begin() == 0;
  }

  std::optional<double> temperature(const std::string& place) const {
    constexpr int kOfTheChip = 0;
    void* device = nullptr;
    unsigned degrees = 0;
    const bool known =
        begun_ && find_(place.c_str(), &device) == 0 && read_(device, kOfTheChip, &degrees) == 0;
    return known ? std::optional<double>(degrees) : std::nullopt;
  }

 private:
  template <class F>
  F* function(const char* name) const {
    return reinterpret_cast<F*>(dlsym(library_, name));
  }
  void* library_;
  int (*find_)(const char*, void**) = nullptr;
  int (*read_)(void*, int, unsigned*) = nullptr;
  bool begun_ = false;
};

}  // namespace

std::optional<double> cpu_temperature(const std::string& hwmon) {
  std::optional<double> highest;
  std::error_code none;
  for (fs::directory_iterator sensors(hwmon, none), end; !none && sensors != end;
       sensors.increment(none)) {
    if (!is_of_a_cpu(sensors->path())) continue;
    for (int i = 1; i <= 256; ++i) {
      double thousandths = 0;
      std::ifstream file(sensors->path() / ("temp" + std::to_string(i) + "_input"));
      if (file >> thousandths) highest = std::max(highest.value_or(-273), thousandths / 1000);
    }
  }
  return highest;
}

std::optional<double> gpu_temperature(const std::string& place) {
  static const auto& library = *new ManagementLibrary;
  return library.temperature(place);
}

std::optional<double> temperature(Device device) try {
  if (device.is_cpu()) return cpu_temperature("/sys/class/hwmon");
  return gpu_temperature(cuda::pci_place(device.index));
} catch (const Error&) {
  return std::nullopt;
}

}  // namespace cairn::core
