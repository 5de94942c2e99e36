#include "cpu/cpu_backend.h"

namespace cairn::kernels {

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace cairn::kernels
