#include "cuda/cuda_backend.h"

namespace cairn::kernels {

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace cairn::kernels
