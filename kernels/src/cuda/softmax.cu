#include "cuda/softmax.cuh"

#include "cuda/contiguous.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

SoftmaxShape shape_of(const TensorView& x, const SoftmaxOptions& options) {
  const std::int64_t columns = x.dims() == 0 ? 1 : x.shape.back();
  const bool lengths = options.lengths.defined();
  return {x.numel() / columns,
          columns,
          options.causal ? x.size(-2) : 0,
          lengths ? x.numel() / columns / x.size(0) : 1,
          lengths ? options.lengths.as<std::int64_t>() : nullptr,
          options.log,
          options.scale};
}

}  // namespace

void CudaBackend::softmax(View x, View y, const SoftmaxOptions& options) const {
  if (x.numel() == 0) return;
  const Queue queue("softmax", y.device);
  const Input in(*this, queue, x);
  const Output out(*this, queue, y);
  const SoftmaxShape shape = shape_of(x, options);
  core::dispatch_floating(x.dtype, "softmax", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(shape.rows, shape.columns), softmax_kernel<T>, shape, in.as<T>(),
           out.as<T>());
  });
  out.finish();
}

void CudaBackend::softmax_backward(View y, View dy, View dx, const SoftmaxOptions& options) const {
  if (y.numel() == 0) return;
  const Queue queue("softmax_backward", dx.device);
  const Input in(*this, queue, y), grad(*this, queue, dy);
  const Output out(*this, queue, dx);
  const SoftmaxShape shape = shape_of(y, options);
  core::dispatch_floating(y.dtype, "softmax_backward", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(shape.rows, shape.columns), softmax_backward_kernel<T>, shape,
           in.as<T>(), grad.as<T>(), out.as<T>());
  });
  out.finish();
}

}  // namespace cairn::kernels
