// Runs before main: these tests want four CPU devices.
#include <cstdlib>

namespace {
const bool kDevicesSet = setenv("CAIRN_CPU_DEVICES", "4", /*overwrite=*/1) == 0;
}  // namespace
