#include "cuda/cudnn/handle.h"

#include <map>
#include <mutex>
#include <vector>

#include "cairn/core/graph.h"

namespace cairn::kernels::cuda {
namespace {

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<cudnnHandle_t>> free;  // by device
};

Pool& pool() {
  static auto& all = *new Pool;  // never destroyed: the driver may be gone when the process ends
  return all;
}

}  // namespace

void check_cudnn(cudnnStatus_t status, const char* op, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char detail[512] = "";
  cudnnGetLastErrorString(detail, sizeof(detail));
  core::fail<core::DeviceError>(op, "expected ", call, " to succeed, got ",
                                cudnnGetErrorString(status), " (", static_cast<int>(status),
                                detail[0] == '\0' ? "" : ": ", detail, ")");
}

CudnnHandle::CudnnHandle(const Queue& queue) : device_(queue.device().index) {
  {
    const std::lock_guard lock(pool().mutex);
    auto& free = pool().free[device_];
    if (!free.empty()) handle_ = free.back(), free.pop_back();
  }
  if (handle_ == nullptr) {
    core::refuse_in_capture("cudnn", "a handle that no warm-up has left");
    check_cudnn(cudnnCreate(&handle_), queue.op(), "cudnnCreate");
  }
  check_cudnn(cudnnSetStream(handle_, static_cast<cudaStream_t>(queue.stream())), queue.op(),
              "cudnnSetStream");
}

CudnnHandle::~CudnnHandle() {
  const std::lock_guard lock(pool().mutex);
  pool().free[device_].push_back(handle_);
}

}  // namespace cairn::kernels::cuda
