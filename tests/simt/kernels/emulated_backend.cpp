// Lets the public functions run the CUDA backend's own kernels on CPU tensors. Vendor libraries are
// not emulated.
#include "cairn/core/error.h"
#include "cuda/cuda_backend.h"
#include "cuda/cudnn/attention.h"

namespace cairn::kernels {

namespace {

[[noreturn]] void not_emulated(const char* op) {
  core::fail<core::Unsupported>(op,
                                "expected a GPU, got the emulator, which runs own kernels only");
}

}  // namespace

const Backend& cpu_backend() {
  return cuda_backend();
}

void CudaBackend::matmul(View, View, View, const MatmulOptions&) const {
  not_emulated("matmul");
}
void CudaBackend::conv2d(View, View, View, View, const Conv2dOptions&) const {
  not_emulated("conv2d");
}
void CudaBackend::conv2d_backward_data(View, View, View, View, const Conv2dOptions&) const {
  not_emulated("conv2d_backward_data");
}
void CudaBackend::conv2d_backward_weight(View, View, View, View, const Conv2dOptions&, bool) const {
  not_emulated("conv2d_backward_weight");
}

namespace cuda {

std::optional<std::int64_t> sdpa_rows_of_zeros(const Queue&, const TensorView&, const TensorView&,
                                               const AttentionOptions&, bool) {
  return {};
}
bool sdpa_forward(const Queue&, const SdpaOperands&, const AttentionOptions&) {
  not_emulated("sdpa_forward");
}
bool sdpa_backward(const Queue&, const SdpaOperands&, const AttentionOptions&) {
  not_emulated("sdpa_backward");
}

}  // namespace cuda

}  // namespace cairn::kernels
