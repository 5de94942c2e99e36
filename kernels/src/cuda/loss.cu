#include "cuda/loss.cuh"

#include "cuda/contiguous.h"
#include "cuda/map.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

CrossEntropyShape shape_of(const TensorView& logits, const TensorView& target,
                           const CrossEntropyOptions& options, ClassSlice slice) {
  return {logits.shape[0],         logits.shape[1],   options.ignore_index,
          options.label_smoothing, target.strides[0], slice};
}

/// f(T{}, L{}) with the types of an input and of its loss.
template <class F>
void dispatch_loss(const TensorView& x, const TensorView& loss, const char* op, F f) {
  core::dispatch_floating(x.dtype, op, [&](auto type) {
    if constexpr (std::is_same_v<decltype(type), double>) {
      if (loss.dtype == DType::f64) return f(type, double{});
    }
    f(type, float{});
  });
}

}  // namespace

void CudaBackend::cross_entropy(View logits, View target, View loss, View lse,
                                const CrossEntropyOptions& options) const {
  if (loss.numel() == 0) return;
  const Queue queue("cross_entropy", logits.device);
  const Input x(*this, queue, logits);
  const CrossEntropyShape shape = shape_of(logits, target, options, {});
  core::dispatch_floating(logits.dtype, "cross_entropy", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(shape.rows, shape.classes), cross_entropy_kernel<T>, shape,
           x.as<T>(), target.as<std::int64_t>(), AnyFloat(loss), AnyFloat(lse));
  });
}

void CudaBackend::cross_entropy_backward(View logits, View target, View lse, View dloss,
                                         View dlogits, const CrossEntropyOptions& options,
                                         ClassSlice slice) const {
  if (dlogits.numel() == 0) return;
  const Queue queue("cross_entropy_backward", logits.device);
  const Input x(*this, queue, logits);
  const Output out(*this, queue, dlogits);
  const CrossEntropyShape shape = shape_of(logits, target, options, slice);
  core::dispatch_floating(logits.dtype, "cross_entropy_backward", [&](auto type) {
    using T = decltype(type);
    launch(queue, grid_for_rows(shape.rows, shape.classes), cross_entropy_backward_kernel<T>, shape,
           x.as<T>(), target.as<std::int64_t>(), AnyFloat(lse), AnyFloat(dloss), out.as<T>());
  });
  out.finish();
}

void CudaBackend::mse(View x, View target, View loss) const {
  const Queue queue("mse", loss.device);
  dispatch_loss(x, loss, "mse", [&](auto type, auto loss_type) {
    using T = decltype(type);
    using L = decltype(loss_type);
    map<L, T, T>(queue, SquaredError<T, L>{}, loss, {&x, &target});
  });
}

void CudaBackend::mse_backward(View x, View target, View dloss, View dx) const {
  const Queue queue("mse_backward", dx.device);
  dispatch_loss(x, dloss, "mse_backward", [&](auto type, auto loss_type) {
    using T = decltype(type);
    using L = decltype(loss_type);
    map<T, T, T, L>(queue, SquaredErrorBackward<T, L>{}, dx, {&x, &target, &dloss});
  });
}

void CudaBackend::bce_with_logits(View x, View target, View loss) const {
  const Queue queue("bce_with_logits", loss.device);
  dispatch_loss(x, loss, "bce_with_logits", [&](auto type, auto loss_type) {
    using T = decltype(type);
    using L = decltype(loss_type);
    map<L, T, T>(queue, BinaryCrossEntropy<T, L>{}, loss, {&x, &target});
  });
}

void CudaBackend::bce_with_logits_backward(View x, View target, View dloss, View dx) const {
  const Queue queue("bce_with_logits_backward", dx.device);
  dispatch_loss(x, dloss, "bce_with_logits_backward", [&](auto type, auto loss_type) {
    using T = decltype(type);
    using L = decltype(loss_type);
    map<T, T, T, L>(queue, BinaryCrossEntropyBackward<T, L>{}, dx, {&x, &target, &dloss});
  });
}

void CudaBackend::bce(View p, View target, View loss) const {
  const Queue queue("bce", loss.device);
  dispatch_loss(p, loss, "bce", [&](auto type, auto loss_type) {
    using T = decltype(type);
    using L = decltype(loss_type);
    map<L, T, T>(queue, ProbabilityCrossEntropy<T, L>{}, loss, {&p, &target});
  });
}

void CudaBackend::bce_backward(View p, View target, View dloss, View dp) const {
  const Queue queue("bce_backward", dp.device);
  dispatch_loss(p, dloss, "bce_backward", [&](auto type, auto loss_type) {
    using T = decltype(type);
    using L = decltype(loss_type);
    map<T, T, T, L>(queue, ProbabilityCrossEntropyBackward<T, L>{}, dp, {&p, &target, &dloss});
  });
}

}  // namespace cairn::kernels
