// The functors of element-wise operations; map.cuh runs them. The operation is a field, not a
// template parameter: a uniform switch costs less than the memory traffic it sits in, and one
// kernel a dtype compiles in seconds.
#pragma once

#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/layout.cuh"
#include "cuda/device/packed.cuh"
#include "math/activations.h"

namespace cairn::kernels::cuda {

template <class F>
__device__ __forceinline__ auto with_activation(UnaryOp op, double slope, F f) {
  switch (op) {
    case UnaryOp::neg:
      return f(math::Neg{});
    case UnaryOp::abs:
      return f(math::Abs{});
    case UnaryOp::exp:
      return f(math::Exp{});
    case UnaryOp::log:
      return f(math::Log{});
    case UnaryOp::sqrt:
      return f(math::Sqrt{});
    case UnaryOp::rsqrt:
      return f(math::Rsqrt{});
    case UnaryOp::tanh:
      return f(math::Tanh{});
    case UnaryOp::sigmoid:
      return f(math::Sigmoid{});
    case UnaryOp::relu:
      return f(math::Relu{});
    case UnaryOp::leaky_relu:
      return f(math::LeakyRelu{slope});
    case UnaryOp::gelu:
      return f(math::Gelu{});
    case UnaryOp::gelu_tanh:
      return f(math::GeluTanh{});
    case UnaryOp::silu:
      return f(math::Silu{});
    case UnaryOp::square:
      break;
  }
  return f(math::Square{});
}

template <class T>
struct Unary {
  UnaryOp op;
  double slope;
  __device__ T operator()(T x) const {
    return narrow<T>(
        with_activation(op, slope, [&](auto activation) { return activation.forward(widen(x)); }));
  }
};

template <class T>
struct UnaryBackward {
  UnaryOp op;
  double slope;
  __device__ T operator()(T saved, T dy) const {
    return narrow<T>(with_activation(
        op, slope, [&](auto activation) { return activation.backward(widen(saved), widen(dy)); }));
  }
};

template <class A>
__device__ __forceinline__ A arithmetic(BinaryOp op, A a, A b) {
  switch (op) {
    case BinaryOp::add:
      return a + b;
    case BinaryOp::sub:
      return a - b;
    case BinaryOp::mul:
      return a * b;
    case BinaryOp::div:
      return a / b;
    case BinaryOp::pow:
      return math::pow(a, b);
    case BinaryOp::maximum:
      return math::max(a, b);
    case BinaryOp::atan2:
      return math::atan2(a, b);
    case BinaryOp::add_relu:
      return math::Relu{}.forward(a + b);
    case BinaryOp::mask:
      return b != A(0) ? a : A(0);
    default:
      return math::min(a, b);
  }
}

/// Integers wrap around; division and powers are for floating dtypes.
__device__ __forceinline__ std::int64_t arithmetic(BinaryOp op, std::int64_t a, std::int64_t b) {
  const auto p = static_cast<std::uint64_t>(a), q = static_cast<std::uint64_t>(b);
  switch (op) {
    case BinaryOp::add:
      return static_cast<std::int64_t>(p + q);
    case BinaryOp::sub:
      return static_cast<std::int64_t>(p - q);
    case BinaryOp::mul:
      return static_cast<std::int64_t>(p * q);
    case BinaryOp::maximum:
      return a > b ? a : b;
    default:
      return a < b ? a : b;
  }
}

template <class A>
__device__ __forceinline__ bool compare(BinaryOp op, A a, A b) {
  switch (op) {
    case BinaryOp::eq:
      return a == b;
    case BinaryOp::ne:
      return a != b;
    case BinaryOp::lt:
      return a < b;
    case BinaryOp::le:
      return a <= b;
    case BinaryOp::gt:
      return a > b;
    default:
      return a >= b;
  }
}

template <class T>
struct Binary {
  BinaryOp op;
  __device__ T operator()(T a, T b) const { return narrow<T>(arithmetic(op, widen(a), widen(b))); }
};

/// 1 or 0 in Out.
template <class T, class Out>
struct Compare {
  BinaryOp op;
  __device__ Out operator()(T a, T b) const {
    return narrow<Out>(static_cast<Arithmetic<Out>>(compare(op, widen(a), widen(b))));
  }
};

/// The arithmetic of two floating types together.
template <class X, class Y>
using Wider =
    std::conditional_t<std::is_same_v<X, double> || std::is_same_v<Y, double>, double, float>;

template <class X, class Y>
struct Affine {
  double scale, shift;
  __device__ Y operator()(X x) const {
    using A = Wider<X, Y>;
    return narrow<Y>(
        math::fma(static_cast<A>(scale), static_cast<A>(widen(x)), static_cast<A>(shift)));
  }
};

template <class T>
struct PowScalar {
  double exponent;
  __device__ T operator()(T value) const {
    using A = Arithmetic<T>;
    const A x = widen(value);
    if (exponent == 2.0) return narrow<T>(x * x);
    if (exponent == 3.0) return narrow<T>(x * x * x);
    if (exponent == -1.0) return narrow<T>(A(1) / x);
    return narrow<T>(math::pow(x, static_cast<A>(exponent)));
  }
};

template <class X, class Y>
struct Axpby {
  double a, b;
  __device__ Y operator()(X x, Y y) const {
    using A = Wider<X, Y>;
    const A scaled = static_cast<A>(a) * static_cast<A>(widen(x));
    return narrow<Y>(math::fma(static_cast<A>(b), static_cast<A>(widen(y)), scaled));
  }
};

}  // namespace cairn::kernels::cuda
