// Runs before main: these tests want three CPU devices, two of them capped.
#include <cstdlib>

namespace {
const bool kDevicesSet = [] {
  setenv("CAIRN_CPU_DEVICES", "3", /*overwrite=*/1);
  setenv("CAIRN_DEVICE_MEMORY", "cpu:1=1M,cpu:2=64K", /*overwrite=*/1);
  return true;
}();
}  // namespace
