// cuDNN handles and status checks. A handle serves one thread and device at a time: calls borrow
// one and give it back.
#pragma once

#include <cudnn.h>

#include "cuda/queue.h"

namespace cairn::kernels::cuda {

void check_cudnn(cudnnStatus_t status, const char* op, const char* call);

/// An answer rather than a failure: something else may serve.
inline bool is_unsupported(cudnnStatus_t status) {
  return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
}

/// A handle of the queue's device, bound to its stream.
class CudnnHandle {
 public:
  explicit CudnnHandle(const Queue& queue);
  ~CudnnHandle();
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  operator cudnnHandle_t() const { return handle_; }  // NOLINT: stands for it in every call

 private:
  int device_;
  cudnnHandle_t handle_ = nullptr;
};

}  // namespace cairn::kernels::cuda
