// unary and unary_backward: one pass, 2 (forward) or 3 (backward) times the tensor's bytes.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/activation.cpp"
#include "cpu/targets.h"
// ---
#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/simd.h"
#include "math/activations.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

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

HWY_EXPORT(UnaryRun);
HWY_EXPORT(UnaryBackwardRun);

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
