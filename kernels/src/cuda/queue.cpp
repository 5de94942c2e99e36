#include "cuda/queue.h"

#include <cstring>

#include <nvtx3/nvToolsExt.h>

#include "cuda/error.h"

namespace cairn::kernels::cuda {
namespace {

cudaStream_t handle(const Queue& queue) {
  return static_cast<cudaStream_t>(queue.stream());
}

}  // namespace

Queue::Queue(const char* op, Device device)
    : op_(op), device_(device), guard_(device), stream_(core::Stream::current(device).native()) {
  nvtxRangePushA(op);
}

Queue::~Queue() {
  nvtxRangePop();
}

void Queue::check_launch() const {
  check_cuda(cudaGetLastError(), op_, "the kernel launch");
}

std::size_t Queue::most_shared_bytes() const {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_.index),
             op_, "cudaDeviceGetAttribute");
  return static_cast<std::size_t>(bytes);
}

bool Queue::capturing() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(handle(*this), &status), op_, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::shared_ptr<core::Storage> Queue::workspace(std::size_t bytes) const {
  const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
  return core::Storage::allocate(bytes, device_);
}

void Queue::copy(void* dst, const void* src, std::size_t bytes) const {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, handle(*this)), op_,
             "cudaMemcpyAsync");
}

void Queue::upload(void* dst, const void* src, std::size_t bytes) const {
  const auto staging = core::Storage::allocate_pinned(bytes);
  std::memcpy(staging->data(), src, bytes);
  check_cuda(cudaMemcpyAsync(dst, staging->data(), bytes, cudaMemcpyHostToDevice, handle(*this)),
             op_, "cudaMemcpyAsync");
  staging->record_use(core::Stream::current(device_));
}

}  // namespace cairn::kernels::cuda
