// Runs before main: the search of plan_training wants several CPU devices.
#include <cstdlib>

namespace {
const bool kDevicesSet = setenv("CAIRN_CPU_DEVICES", "4", /*overwrite=*/1) == 0;
}  // namespace
