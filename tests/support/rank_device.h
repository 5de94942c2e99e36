// Where a rank's tensors are.
#pragma once

#include "cairn/core/device.h"

namespace cairn::test {

/// The tested device, or a GPU of the rank's own.
inline Device device_of_rank(int rank) {
  const Device tested = core::default_device();
  return tested.is_cpu() ? tested : Device{core::DeviceType::cuda, tested.index + rank};
}
inline bool has_devices_of(int ranks) {
  const Device last = device_of_rank(ranks - 1);
  return last.index < core::device_count(last.type);
}

}  // namespace cairn::test
