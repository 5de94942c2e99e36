// Sensors as Linux shows them, and NVIDIA's library as the driver brings it (tests/gpu/nvml).
#include "temperature.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cairn/core/status.h"
#include "cairn/core/temperature.h"
#include "tools/shell.h"

namespace cairn::core {
namespace {

void add_sensor(const test::TemporaryFolder& folder, const std::string& device,
                const std::string& name, const std::string& file, const std::string& value) {
  std::filesystem::create_directories(folder / device);
  std::ofstream(folder / device / "name") << name << "\n";
  std::ofstream(folder / device / file) << value << "\n";
}

TEST(Temperature, OfACpuIsTheHighestOfItsOwnSensors) {
  const test::TemporaryFolder folder;
  EXPECT_EQ(cpu_temperature(folder.string()), std::nullopt);
  add_sensor(folder, "hwmon0", "nvme", "temp1_input", "81000");
  EXPECT_EQ(cpu_temperature(folder.string()), std::nullopt);
  add_sensor(folder, "hwmon1", "k10temp", "temp1_input", "52125");
  add_sensor(folder, "hwmon1", "k10temp", "temp3_input", "61500");
  add_sensor(folder, "hwmon1", "k10temp", "temp4_input", "no number");
  add_sensor(folder, "hwmon2", "coretemp", "temp2_input", "47000");
  EXPECT_EQ(cpu_temperature(folder.string()), 61.5);
  EXPECT_EQ(cpu_temperature("/no/such/folder"), std::nullopt);
}

TEST(Temperature, OfADeviceThatDoesNotExistIsUnknown) {
  EXPECT_EQ(temperature({DeviceType::cuda, 99}), std::nullopt);
  EXPECT_EQ(gpu_temperature("9999:ff:00.0"), std::nullopt);
}

/// Where the environment has the library that the next test program brings.
TEST(Temperature, OfAGpuIsWhatTheDriversLibrarySays) {
  if (std::getenv("CAIRN_TEST_NVML") == nullptr) GTEST_SKIP() << "no libnvidia-ml of the tests";
  EXPECT_EQ(gpu_temperature("0000:01:00.0"), 61);
  EXPECT_EQ(gpu_temperature("0000:02:00.0"), 62);
  EXPECT_EQ(gpu_temperature("0000:00:00.0"), std::nullopt);
}

}  // namespace
}  // namespace cairn::core
