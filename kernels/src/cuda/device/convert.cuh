// Storage types and the arithmetic done on them: halves in float, double in double, integers in 64
// bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cairn/core/dtype.h"
#include "cuda/device/simt.h"

namespace cairn::kernels::cuda {

using core::BFloat16;
using core::Half;

template <class T>
inline constexpr bool is_half_type = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

template <class T>
struct ArithmeticOf {
  using type = std::int64_t;
};
template <>
struct ArithmeticOf<Half> {
  using type = float;
};
template <>
struct ArithmeticOf<BFloat16> {
  using type = float;
};
template <>
struct ArithmeticOf<float> {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <class T>
using Arithmetic = typename ArithmeticOf<T>::type;

template <class T>
__device__ __forceinline__ Arithmetic<T> widen(T x) {
  return static_cast<Arithmetic<T>>(x);
}

/// Rounds to the nearest even, once.
template <class T, class A>
__device__ __forceinline__ T narrow(A x) {
  if constexpr (is_half_type<T>) {
    return T(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, bool>) {
    return x != A(0);
  } else {
    return static_cast<T>(x);
  }
}

#if defined(__CUDA_ARCH__)  // the hardware's conversions
template <>
__device__ __forceinline__ float widen(Half x) {
  return __half2float(__ushort_as_half(x.bits));
}
template <>
__device__ __forceinline__ Half narrow<Half>(float x) {
  Half y;
  y.bits = __half_as_ushort(__float2half_rn(x));
  return y;
}
template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float x) {
  BFloat16 y;
  y.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return y;
}
#endif

/// A floating vector whose dtype is known at run time: weights, biases, statistics and gradients
/// that may be f32 beside half images.
struct AnyFloat {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 1;

  AnyFloat() = default;
  __device__ __host__ AnyFloat(void* data, DType dtype) : data(data), dtype(dtype) {}
  template <class View>
  explicit AnyFloat(const View& view)
      : data(view.data), dtype(view.dtype), stride(view.dims() == 1 ? view.strides[0] : 1) {}

  __device__ bool present() const { return data != nullptr; }
  template <class T>
  __device__ T* at(std::int64_t i) const {
    return static_cast<T*>(data) + i * stride;
  }

  template <class A>
  __device__ A load(std::int64_t i) const {
    switch (dtype) {
      case DType::f16:
        return static_cast<A>(widen(*at<Half>(i)));
      case DType::bf16:
        return static_cast<A>(widen(*at<BFloat16>(i)));
      case DType::f64:
        return static_cast<A>(*at<double>(i));
      default:
        return static_cast<A>(*at<float>(i));
    }
  }
  template <class A>
  __device__ A load_or(std::int64_t i, A absent) const {
    return present() ? load<A>(i) : absent;
  }

  template <class A>
  __device__ void store(std::int64_t i, A value) const {
    switch (dtype) {
      case DType::f16:
        *at<Half>(i) = narrow<Half>(static_cast<float>(value));
        break;
      case DType::bf16:
        *at<BFloat16>(i) = narrow<BFloat16>(static_cast<float>(value));
        break;
      case DType::f64:
        *at<double>(i) = static_cast<double>(value);
        break;
      default:
        *at<float>(i) = static_cast<float>(value);
        break;
    }
  }
  template <class A>
  __device__ void store(std::int64_t i, A value, bool accumulate) const {
    store(i, accumulate ? load<A>(i) + value : value);
  }
};

}  // namespace cairn::kernels::cuda
