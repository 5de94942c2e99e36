#include "vendor_versions.h"

#include <cublasLt.h>
#include <cudnn.h>

#include "cairn/core/error.h"

namespace cairn::kernels {

core::LibraryVersions cuda_versions() {
  const std::size_t cublas = cublasLtGetVersion(), cudnn = cudnnGetVersion();
  return {{"cuBLASLt", core::str(cublas / 10000, ".", cublas / 100 % 100, ".", cublas % 100)},
          {"cuDNN", core::str(cudnn / 10000, ".", cudnn / 100 % 100, ".", cudnn % 100)}};
}

}  // namespace cairn::kernels
