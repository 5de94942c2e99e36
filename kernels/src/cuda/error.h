// Turns a failing CUDA runtime call into core::DeviceError with the call, CUDA's text and the code.
#pragma once

#include <cuda_runtime.h>

#include "cairn/core/error.h"

namespace cairn::kernels::cuda {

inline void check_cuda(cudaError_t code, const char* op, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // a failure reported here must not be found again by the next check
  core::fail<core::DeviceError>(op, "expected ", call, " to succeed, got ",
                                cudaGetErrorString(code), " (", cudaGetErrorName(code), ", ",
                                static_cast<int>(code), ")");
}

}  // namespace cairn::kernels::cuda
