// exp log sqrt tanh, the activations, dropout.
#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "ops/common.h"

namespace cairn::autograd {

using kernels::UnaryOp;

namespace {

constexpr OpInfo info_of(UnaryOp op) {
  switch (op) {
    case UnaryOp::neg:
      return {"neg"};
    case UnaryOp::abs:
      return {"abs"};
    case UnaryOp::exp:
      return {"exp", CastPolicy::f32};
    case UnaryOp::log:
      return {"log", CastPolicy::f32};
    case UnaryOp::sqrt:
      return {"sqrt"};
    case UnaryOp::rsqrt:
      return {"rsqrt", CastPolicy::f32};
    case UnaryOp::tanh:
      return {"tanh"};
    case UnaryOp::sigmoid:
      return {"sigmoid"};
    case UnaryOp::relu:
      return {"relu"};
    case UnaryOp::leaky_relu:
      return {"leaky_relu"};
    case UnaryOp::gelu:
    case UnaryOp::gelu_tanh:
      return {"gelu"};
    case UnaryOp::silu:
      return {"silu"};
    case UnaryOp::square:
      return {"square", CastPolicy::f32};
  }
  return {"unary"};
}

template <UnaryOp op>
struct Unary {
  static constexpr OpInfo kInfo = info_of(op);
  double slope = 0.01;

  Tensor forward(Context& ctx, const Tensor& x) {
    const bool saves_output = kernels::saves_output(op);
    if (!saves_output) ctx.save(x);
    Tensor y = Tensor::empty_like(x);
    kernels::unary(op, x, y, slope);
    if (saves_output) ctx.save(y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor saved = ctx.saved(0);
    const Tensor dx = reuse_or_new(dy, saved);
    kernels::unary_backward(op, saved, dy, dx, slope);
    return {dx};
  }
};

struct Dropout {
  static constexpr OpInfo kInfo{"dropout"};
  double p;
  core::RandomDraw draw;

  Tensor forward(Context&, const Tensor& x) { return masked(x, Tensor::empty_like(x)); }
  Tensors backward(Context&, const Tensor& dy) { return {masked(dy, reuse_or_new(dy, dy))}; }

 private:
  Tensor masked(const Tensor& x, const Tensor& y) const {
    if (p == 1.0) {
      kernels::fill(y, 0.0);
    } else {
      kernels::dropout(x, p, draw, y);
    }
    return y;
  }
};

}  // namespace

Tensor abs(const Tensor& x) {
  return apply(Unary<UnaryOp::abs>{}, x);
}
Tensor neg(const Tensor& x) {
  return apply(Unary<UnaryOp::neg>{}, x);
}
Tensor rsqrt(const Tensor& x) {
  return apply(Unary<UnaryOp::rsqrt>{}, x);
}
Tensor square(const Tensor& x) {
  return apply(Unary<UnaryOp::square>{}, x);
}
Tensor exp(const Tensor& x) {
  return apply(Unary<UnaryOp::exp>{}, x);
}
Tensor log(const Tensor& x) {
  return apply(Unary<UnaryOp::log>{}, x);
}
Tensor sqrt(const Tensor& x) {
  return apply(Unary<UnaryOp::sqrt>{}, x);
}
Tensor tanh(const Tensor& x) {
  return apply(Unary<UnaryOp::tanh>{}, x);
}
Tensor sigmoid(const Tensor& x) {
  return apply(Unary<UnaryOp::sigmoid>{}, x);
}
Tensor relu(const Tensor& x) {
  return apply(Unary<UnaryOp::relu>{}, x);
}
Tensor leaky_relu(const Tensor& x, double slope) {
  return apply(Unary<UnaryOp::leaky_relu>{slope}, x);
}
Tensor gelu(const Tensor& x, bool tanh_approximation) {
  if (tanh_approximation) return apply(Unary<UnaryOp::gelu_tanh>{}, x);
  return apply(Unary<UnaryOp::gelu>{}, x);
}
Tensor silu(const Tensor& x) {
  return apply(Unary<UnaryOp::silu>{}, x);
}

Tensor dropout(const Tensor& x, double p) {
  CAIRN_CHECK(p >= 0.0 && p <= 1.0, "dropout", "expected p in 0..1, got ", p);
  if (p == 0.0) return x;
  return apply(Dropout{p, Generator::current().draw()}, x);
}

}  // namespace cairn::autograd
