#include "cuda/elementwise.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/map.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

/// f(X{}, Y{}) with the storage types of two floating views.
template <class F>
void dispatch_two(const TensorView& x, const TensorView& y, const char* op, F f) {
  core::dispatch_floating(x.dtype, op, [&](auto from) {
    core::dispatch_floating(y.dtype, op, [&](auto to) { f(from, to); });
  });
}

}  // namespace

void CudaBackend::unary(UnaryOp op, View x, View y, double slope) const {
  const Queue queue("unary", y.device);
  core::dispatch_floating(y.dtype, "unary", [&](auto type) {
    using T = decltype(type);
    map<T, T>(queue, Unary<T>{op, slope}, y, {&x});
  });
}

void CudaBackend::unary_backward(UnaryOp op, View saved, View dy, View dx, double slope) const {
  const Queue queue("unary_backward", dx.device);
  core::dispatch_floating(dx.dtype, "unary_backward", [&](auto type) {
    using T = decltype(type);
    map<T, T, T>(queue, UnaryBackward<T>{op, slope}, dx, {&saved, &dy});
  });
}

void CudaBackend::binary(BinaryOp op, View a, View b, View y) const {
  const Queue queue("binary", y.device);
  core::dispatch_all(a.dtype, [&](auto type) {
    using T = decltype(type);
    if (is_comparison(op) && y.dtype == DType::boolean) {
      map<bool, T, T>(queue, Compare<T, bool>{op}, y, {&a, &b});
    } else if (is_comparison(op)) {
      map<T, T, T>(queue, Compare<T, T>{op}, y, {&a, &b});
    } else {
      map<T, T, T>(queue, Binary<T>{op}, y, {&a, &b});
    }
  });
}

void CudaBackend::affine(View x, double scale, double shift, View y) const {
  const Queue queue("affine", y.device);
  dispatch_two(x, y, "affine", [&](auto from, auto to) {
    using X = decltype(from);
    using Y = decltype(to);
    map<Y, X>(queue, Affine<X, Y>{scale, shift}, y, {&x});
  });
}

void CudaBackend::pow_scalar(View x, double exponent, View y) const {
  const Queue queue("pow_scalar", y.device);
  core::dispatch_floating(y.dtype, "pow_scalar", [&](auto type) {
    using T = decltype(type);
    map<T, T>(queue, PowScalar<T>{exponent}, y, {&x});
  });
}

void CudaBackend::axpby(double a, View x, double b, View y) const {
  if (b == 0.0) {  // y is not read: it may hold NaN
    affine(x, a, 0.0, y);
    return;
  }
  const Queue queue("axpby", y.device);
  dispatch_two(x, y, "axpby", [&](auto from, auto to) {
    using X = decltype(from);
    using Y = decltype(to);
    map<Y, X, Y>(queue, Axpby<X, Y>{a, b}, y, {&x, &y});
  });
}

}  // namespace cairn::kernels
