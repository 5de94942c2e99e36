// What Cairn calls of NVIDIA's management library: two GPUs, of 61 and 62 degrees.
#include <cstring>

extern "C" {

int nvmlInit_v2() {
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* place, void** device) {
  static int gpus[] = {61, 62};
  const bool first = std::strcmp(place, "0000:01:00.0") == 0;
  if (!first && std::strcmp(place, "0000:02:00.0") != 0) return 6;  // not found
  *device = &gpus[first ? 0 : 1];
  return 0;
}

int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) {
  if (sensor != 0) return 2;  // invalid argument
  *degrees = static_cast<unsigned>(*static_cast<int*>(device));
  return 0;
}

}  // extern "C"
