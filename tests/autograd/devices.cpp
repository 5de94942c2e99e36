// Runs before main: these tests want two CPU devices.
#include <cstdlib>

namespace {
const bool kDevicesSet = setenv("CAIRN_CPU_DEVICES", "2", /*overwrite=*/1) == 0;
}  // namespace
