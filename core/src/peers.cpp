#include "cairn/core/peers.h"

#include "cuda_interface.h"

namespace cairn::core {

bool reaches(Device device, Device other) {
  if (device.type != other.type) return false;
  return device.is_cpu() || device == other || cuda::reaches(device.index, other.index);
}

}  // namespace cairn::core
