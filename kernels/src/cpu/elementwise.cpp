// Element-wise kernels: each reads its inputs and writes its output once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/elementwise.cpp"
#include "cpu/targets.h"
// ---
#include <cmath>

#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/simd.h"
#include "math/activations.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

struct Add {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};
struct Sub {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return a - b;
  }
};
struct Mul {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return a * b;
  }
};
struct Div {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return a / b;
  }
};
struct Pow {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return pow(a, b);
  }
};
struct Maximum {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return max(a, b);
  }
};
struct Minimum {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return min(a, b);
  }
};
struct AddRelu {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return math::Relu{}.forward(a + b);
  }
};
struct Masked {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return select(b != V(0.0), a, V(0.0));
  }
};

template <class F, class T>
void binary_run(const F& f, const T* a, const T* b, T* y, std::int64_t n) {
  for_vectors<Compute<T>>(n, [&](auto io, std::int64_t i)
                                 HWY_ATTR { io.store(f(io.load(a + i), io.load(b + i)), y + i); });
}

template <class T>
void arithmetic_run(BinaryOp op, void* const* data, std::int64_t n) {
  const T* a = static_cast<const T*>(data[0]);
  const T* b = static_cast<const T*>(data[1]);
  T* y = static_cast<T*>(data[2]);
  switch (op) {
    case BinaryOp::add:
      return binary_run(Add{}, a, b, y, n);
    case BinaryOp::sub:
      return binary_run(Sub{}, a, b, y, n);
    case BinaryOp::mul:
      return binary_run(Mul{}, a, b, y, n);
    case BinaryOp::div:
      return binary_run(Div{}, a, b, y, n);
    case BinaryOp::pow:
      return binary_run(Pow{}, a, b, y, n);
    case BinaryOp::maximum:
      return binary_run(Maximum{}, a, b, y, n);
    case BinaryOp::minimum:
      return binary_run(Minimum{}, a, b, y, n);
    case BinaryOp::add_relu:
      return binary_run(AddRelu{}, a, b, y, n);
    case BinaryOp::mask:
      return binary_run(Masked{}, a, b, y, n);
    case BinaryOp::atan2:
    case BinaryOp::eq:
    case BinaryOp::ne:
    case BinaryOp::lt:
    case BinaryOp::le:
    case BinaryOp::gt:
    case BinaryOp::ge:
      break;  // by atan2_run and compare_run
  }
}

void ArithmeticRun(BinaryOp op, DType dtype, void* const* data, std::int64_t n) {
  core::dispatch_floating(dtype, "binary",
                          [&](auto zero) { arithmetic_run<decltype(zero)>(op, data, n); });
}

template <class T, class U>
void affine_run(const T* x, double scale, double shift, U* y, std::int64_t n) {
  using V = Compute2<T, U>;
  const V a(scale), b(shift);
  for_vectors<V>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(a * io.load(x + i) + b, y + i); });
}

template <class T, class U>
void axpby_run(double a, const T* x, double b, const U* y_old, U* y, std::int64_t n) {
  using V = Compute2<T, U>;
  const V va(a), vb(b);
  for_vectors<V>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(va * io.load(x + i) + vb * io.load(y_old + i), y + i);
  });
}

/// Calls f(T{}, U{}) for two floating dtypes.
template <class F>
void dispatch_pair(DType t, DType u, const char* where, const F& f) {
  core::dispatch_floating(
      t, where, [&](auto a) { core::dispatch_floating(u, where, [&](auto b) { f(a, b); }); });
}

void AffineRun(DType from, DType to, double scale, double shift, void* const* data,
               std::int64_t n) {
  dispatch_pair(from, to, "affine", [&](auto a, auto b) {
    affine_run(static_cast<const decltype(a)*>(data[0]), scale, shift,
               static_cast<decltype(b)*>(data[1]), n);
  });
}

void AxpbyRun(DType from, DType to, double a, double b, void* const* data, std::int64_t n) {
  dispatch_pair(from, to, "axpby", [&](auto t, auto u) {
    using U = decltype(u);
    axpby_run(a, static_cast<const decltype(t)*>(data[0]), b, static_cast<const U*>(data[1]),
              static_cast<U*>(data[2]), n);
  });
}

template <class F, class T>
void map_run(const F& f, const T* x, T* y, std::int64_t n) {
  for_vectors<Compute<T>>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(f(io.load(x + i)), y + i); });
}

struct Cube {
  template <class V>
  HWY_INLINE V operator()(V x) const {
    return x * x * x;
  }
};
struct SquareOf {
  template <class V>
  HWY_INLINE V operator()(V x) const {
    return x * x;
  }
};
struct Reciprocal {
  template <class V>
  HWY_INLINE V operator()(V x) const {
    return V(1.0) / x;
  }
};
struct PowerOf {
  double exponent;
  template <class V>
  HWY_INLINE V operator()(V x) const {
    return pow(x, V(exponent));
  }
};

void PowScalarRun(DType dtype, double exponent, void* const* data, std::int64_t n) {
  core::dispatch_floating(dtype, "pow_scalar", [&](auto zero) {
    using T = decltype(zero);
    const T* x = static_cast<const T*>(data[0]);
    T* y = static_cast<T*>(data[1]);
    if (exponent == 2.0) return map_run(SquareOf{}, x, y, n);
    if (exponent == 3.0) return map_run(Cube{}, x, y, n);
    if (exponent == -1.0) return map_run(Reciprocal{}, x, y, n);
    map_run(PowerOf{exponent}, x, y, n);
  });
}

/// Calls visit(activation).
template <class Visit>
void visit_activation(UnaryOp op, double slope, const Visit& visit) {
  switch (op) {
    case UnaryOp::neg:
      return visit(math::Neg{});
    case UnaryOp::abs:
      return visit(math::Abs{});
    case UnaryOp::exp:
      return visit(math::Exp{});
    case UnaryOp::log:
      return visit(math::Log{});
    case UnaryOp::sqrt:
      return visit(math::Sqrt{});
    case UnaryOp::rsqrt:
      return visit(math::Rsqrt{});
    case UnaryOp::tanh:
      return visit(math::Tanh{});
    case UnaryOp::sigmoid:
      return visit(math::Sigmoid{});
    case UnaryOp::relu:
      return visit(math::Relu{});
    case UnaryOp::leaky_relu:
      return visit(math::LeakyRelu{slope});
    case UnaryOp::gelu:
      return visit(math::Gelu{});
    case UnaryOp::gelu_tanh:
      return visit(math::GeluTanh{});
    case UnaryOp::silu:
      return visit(math::Silu{});
    case UnaryOp::square:
      return visit(math::Square{});
  }
}

template <class F, class T>
void forward_run(const F& f, const T* x, T* y, std::int64_t n) {
  for_vectors<Compute<T>>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(f.forward(io.load(x + i)), y + i); });
}

template <class F, class T>
void backward_run(const F& f, const T* saved, const T* dy, T* dx, std::int64_t n) {
  for_vectors<Compute<T>>(n, [&](auto io, std::int64_t i) HWY_ATTR {
    io.store(f.backward(io.load(saved + i), io.load(dy + i)), dx + i);
  });
}

void UnaryRun(UnaryOp op, DType dtype, double slope, void* const* data, std::int64_t n) {
  visit_activation(op, slope, [&](const auto& f) {
    core::dispatch_floating(dtype, "unary", [&](auto zero) {
      using T = decltype(zero);
      forward_run(f, static_cast<const T*>(data[0]), static_cast<T*>(data[1]), n);
    });
  });
}

void UnaryBackwardRun(UnaryOp op, DType dtype, double slope, void* const* data, std::int64_t n) {
  visit_activation(op, slope, [&](const auto& f) {
    core::dispatch_floating(dtype, "unary_backward", [&](auto zero) {
      using T = decltype(zero);
      backward_run(f, static_cast<const T*>(data[0]), static_cast<const T*>(data[1]),
                   static_cast<T*>(data[2]), n);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(ArithmeticRun);
HWY_EXPORT(AffineRun);
HWY_EXPORT(AxpbyRun);
HWY_EXPORT(PowScalarRun);
HWY_EXPORT(UnaryRun);
HWY_EXPORT(UnaryBackwardRun);

namespace {

/// What comparisons and integer arithmetic see of an element: halves as float, integers as
/// themselves.
template <class T>
auto value_of(T x) {
  if constexpr (std::is_same_v<T, core::Half> || std::is_same_v<T, core::BFloat16>) {
    return static_cast<float>(x);
  } else {
    return x;
  }
}

template <class Y>
Y truth(bool x) {
  if constexpr (std::is_same_v<Y, core::Half> || std::is_same_v<Y, core::BFloat16>) {
    return Y(x ? 1.0f : 0.0f);
  } else {
    return static_cast<Y>(x);
  }
}

template <class T, class Y>
void compare_run(BinaryOp op, const T* a, const T* b, Y* y, std::int64_t n) {
  const auto each = [&](auto compare) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = truth<Y>(compare(value_of(a[i]), value_of(b[i])));
  };
  switch (op) {
    case BinaryOp::eq:
      return each([](auto p, auto q) { return p == q; });
    case BinaryOp::ne:
      return each([](auto p, auto q) { return p != q; });
    case BinaryOp::lt:
      return each([](auto p, auto q) { return p < q; });
    case BinaryOp::le:
      return each([](auto p, auto q) { return p <= q; });
    case BinaryOp::gt:
      return each([](auto p, auto q) { return p > q; });
    case BinaryOp::ge:
      return each([](auto p, auto q) { return p >= q; });
    case BinaryOp::add:
    case BinaryOp::sub:
    case BinaryOp::mul:
    case BinaryOp::div:
    case BinaryOp::pow:
    case BinaryOp::maximum:
    case BinaryOp::minimum:
    case BinaryOp::atan2:
    case BinaryOp::add_relu:
    case BinaryOp::mask:
      break;
  }
}

/// Highway has no arc tangent of two arguments: element by element.
void atan2_run(DType dtype, void* const* data, std::int64_t n) {
  core::dispatch_floating(dtype, "binary", [&](auto zero) {
    using T = decltype(zero);
    const T* a = static_cast<const T*>(data[0]);
    const T* b = static_cast<const T*>(data[1]);
    T* y = static_cast<T*>(data[2]);
    for (std::int64_t i = 0; i < n; ++i) y[i] = T(std::atan2(value_of(a[i]), value_of(b[i])));
  });
}

/// Integers wrap around; booleans are computed as integers and are true where the result is not 0.
template <class T>
void integer_run(BinaryOp op, const T* a, const T* b, T* y, std::int64_t n) {
  using Wide = std::uint64_t;
  const auto each = [&](auto f) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(f(a[i], b[i]));
  };
  switch (op) {
    case BinaryOp::add:
      return each([](T p, T q) { return static_cast<Wide>(p) + static_cast<Wide>(q); });
    case BinaryOp::sub:
      return each([](T p, T q) { return static_cast<Wide>(p) - static_cast<Wide>(q); });
    case BinaryOp::mul:
      return each([](T p, T q) { return static_cast<Wide>(p) * static_cast<Wide>(q); });
    case BinaryOp::maximum:
      return each([](T p, T q) { return p > q ? p : q; });
    case BinaryOp::minimum:
      return each([](T p, T q) { return p < q ? p : q; });
    case BinaryOp::div:
    case BinaryOp::pow:
    case BinaryOp::atan2:
    case BinaryOp::add_relu:
    case BinaryOp::mask:
      core::fail("binary", "expected a floating dtype, got ", core::name(core::dtype_of<T>));
    case BinaryOp::eq:
    case BinaryOp::ne:
    case BinaryOp::lt:
    case BinaryOp::le:
    case BinaryOp::gt:
    case BinaryOp::ge:
      break;
  }
}

void binary_block(BinaryOp op, DType x, DType y, void* const* data, std::int64_t n) {
  if (core::is_floating(x) && op == BinaryOp::atan2) return atan2_run(x, data, n);
  if (core::is_floating(x) && !is_comparison(op)) {
    HWY_DYNAMIC_DISPATCH(ArithmeticRun)(op, x, data, n);
    return;
  }
  core::dispatch_all(x, [&](auto zero) {
    using T = decltype(zero);
    const T* a = static_cast<const T*>(data[0]);
    const T* b = static_cast<const T*>(data[1]);
    if (!is_comparison(op)) {
      if constexpr (std::is_integral_v<T>) integer_run(op, a, b, static_cast<T*>(data[2]), n);
    } else if (y == DType::boolean) {
      compare_run(op, a, b, static_cast<bool*>(data[2]), n);
    } else {
      compare_run(op, a, b, static_cast<T*>(data[2]), n);
    }
  });
}

}  // namespace

void CpuBackend::binary(BinaryOp op, View a, View b, View y) const {
  cpu::for_each_run({cpu::in(a), cpu::in(b), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      binary_block(op, a.dtype, y.dtype, data, n);
                    });
}

void CpuBackend::affine(View x, double scale, double shift, View y) const {
  cpu::for_each_run({cpu::in(x), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(AffineRun)(x.dtype, y.dtype, scale, shift, data, n);
                    });
}

void CpuBackend::axpby(double a, View x, double b, View y) const {
  if (b == 0.0) return affine(x, a, 0.0, y);  // y is not read: what it held may be NaN
  cpu::for_each_run({cpu::in(x), cpu::in(y), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(AxpbyRun)(x.dtype, y.dtype, a, b, data, n);
                    });
}

void CpuBackend::pow_scalar(View x, double exponent, View y) const {
  cpu::for_each_run({cpu::in(x), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(PowScalarRun)(x.dtype, exponent, data, n);
                    });
}

void CpuBackend::unary(UnaryOp op, View x, View y, double slope) const {
  cpu::for_each_run({cpu::in(x), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(UnaryRun)(op, x.dtype, slope, data, n);
                    });
}

void CpuBackend::unary_backward(UnaryOp op, View saved, View dy, View dx, double slope) const {
  cpu::for_each_run({cpu::in(saved), cpu::in(dy), cpu::out(dx)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      HWY_DYNAMIC_DISPATCH(UnaryBackwardRun)(op, dx.dtype, slope, data, n);
                    });
}

}  // namespace cairn::kernels
#endif
