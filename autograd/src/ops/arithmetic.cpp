// add sub mul div maximum minimum atan2 add_relu where clamp, comparisons, affine, pow, and the
// operators.
#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using kernels::BinaryOp;

namespace {

Tensor broadcast_binary(BinaryOp op, const char* name, const Tensor& a, const Tensor& b,
                        DType dtype) {
  const Shape shape = core::broadcast_shapes(a.shape(), b.shape(), name);
  Strides strides = core::contiguous_strides(shape);
  for (const Tensor* operand : {&b, &a}) {  // a's layout, or b's where a is spread
    if (operand->shape() == shape && operand->view().is_dense()) strides = operand->strides();
  }
  Tensor y = Tensor::empty_strided(shape, strides, dtype, a.device());
  kernels::binary(op, a, b, y);
  return y;
}

Tensor scaled(const Tensor& x, double scale) {
  Tensor y = Tensor::empty_like(x);
  kernels::affine(x, scale, 0.0, y);
  return y;
}

Tensor product(BinaryOp op, const Tensor& a, const Tensor& b) {
  return broadcast_binary(op, "backward", a, b, a.dtype());
}

struct Add {
  static constexpr OpInfo kInfo{"add", CastPolicy::promote};
  Tensor forward(Context&, const Tensor& a, const Tensor& b) {
    return broadcast_binary(BinaryOp::add, kInfo.name, a, b, a.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(2);
    if (ctx.needs_grad(0)) gradients[0] = sum_to_input(ctx, 0, dy);
    if (ctx.needs_grad(1)) gradients[1] = sum_to_input(ctx, 1, dy);
    return gradients;
  }
};

struct Sub {
  static constexpr OpInfo kInfo{"sub", CastPolicy::promote};
  Tensor forward(Context&, const Tensor& a, const Tensor& b) {
    return broadcast_binary(BinaryOp::sub, kInfo.name, a, b, a.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(2);
    if (ctx.needs_grad(0)) gradients[0] = sum_to_input(ctx, 0, dy);
    if (ctx.needs_grad(1)) gradients[1] = sum_to_input(ctx, 1, scaled(dy, -1.0));
    return gradients;
  }
};

struct Mul {
  static constexpr OpInfo kInfo{"mul", CastPolicy::promote};
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    ctx.save(ctx.needs_grad(1) ? a : Tensor());
    ctx.save(ctx.needs_grad(0) ? b : Tensor());
    return broadcast_binary(BinaryOp::mul, kInfo.name, a, b, a.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(2);
    for (int i = 0; i < 2; ++i) {
      if (!ctx.needs_grad(i)) continue;
      gradients[static_cast<std::size_t>(i)] =
          sum_to_input(ctx, i, product(BinaryOp::mul, dy, ctx.saved(1 - i)));
    }
    return gradients;
  }
};

// db = -dy y / b.
struct Div {
  static constexpr OpInfo kInfo{"div", CastPolicy::promote};
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    Tensor y = broadcast_binary(BinaryOp::div, kInfo.name, a, b, a.dtype());
    ctx.save(b);
    ctx.save(ctx.needs_grad(1) ? y : Tensor());
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(2);
    const Tensor over_b = product(BinaryOp::div, dy, ctx.saved(0));
    if (ctx.needs_grad(1)) {
      const Tensor db = product(BinaryOp::mul, over_b, ctx.saved(1));
      kernels::affine(db, -1.0, 0.0, db);
      gradients[1] = sum_to_input(ctx, 1, db);
    }
    if (ctx.needs_grad(0)) gradients[0] = sum_to_input(ctx, 0, over_b);
    return gradients;
  }
};

// Equal operands share the gradient evenly: each side's weight is ([a > b] + [a >= b]) / 2, and
// with < the other way round.
template <bool largest>
struct Extremum {
  static constexpr OpInfo kInfo{largest ? "maximum" : "minimum", CastPolicy::promote};
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    ctx.save(a);
    ctx.save(b);
    const BinaryOp op = largest ? BinaryOp::maximum : BinaryOp::minimum;
    return broadcast_binary(op, kInfo.name, a, b, a.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor a = ctx.saved(0), b = ctx.saved(1);
    Tensors gradients(2);
    if (ctx.needs_grad(0)) gradients[0] = sum_to_input(ctx, 0, share(a, b, dy));
    if (ctx.needs_grad(1)) gradients[1] = sum_to_input(ctx, 1, share(b, a, dy));
    return gradients;
  }

 private:
  static Tensor share(const Tensor& mine, const Tensor& other, const Tensor& dy) {
    Tensor weight = product(largest ? BinaryOp::gt : BinaryOp::lt, mine, other);
    const Tensor not_beyond = product(largest ? BinaryOp::ge : BinaryOp::le, mine, other);
    kernels::axpby(0.5, not_beyond, 0.5, weight);
    kernels::binary(BinaryOp::mul, dy, weight, weight);
    return weight;
  }
};

// relu(a + b) in one pass; the result alone is kept.
struct AddRelu {
  static constexpr OpInfo kInfo{"add_relu", CastPolicy::promote};
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    Tensor y = broadcast_binary(BinaryOp::add_relu, kInfo.name, a, b, a.dtype());
    ctx.save(y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor y = ctx.saved(0), dx = reuse_or_new(dy, y);
    kernels::unary_backward(kernels::UnaryOp::relu, y, dy, dx);
    Tensors gradients(2);
    if (ctx.needs_grad(0)) gradients[0] = sum_to_input(ctx, 0, dx);
    if (ctx.needs_grad(1)) gradients[1] = sum_to_input(ctx, 1, dx);
    return gradients;
  }
};

// mask(a, c) + mask(b, not c): what is not taken is 0 there, whatever it was.
struct Where {
  static constexpr OpInfo kInfo{"where", CastPolicy::promote};
  Tensor condition;  // no input: it stays boolean
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    CAIRN_CHECK(condition.defined() && condition.dtype() == DType::boolean, kInfo.name,
                "expected a boolean condition, got ",
                condition.defined() ? core::str(condition.dtype()) : "none");
    ctx.save(condition);
    const Tensor yes = in_dtype_of(a, condition), no = inverse(yes);
    return product(BinaryOp::add, product(BinaryOp::mask, a, yes), product(BinaryOp::mask, b, no));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor yes = in_dtype_of(dy, ctx.saved(0));
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = sum_to_input(ctx, 0, product(BinaryOp::mask, dy, yes));
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = sum_to_input(ctx, 1, product(BinaryOp::mask, dy, inverse(yes)));
    }
    return gradients;
  }

 private:
  static Tensor in_dtype_of(const Tensor& x, const Tensor& condition) {
    Tensor values = empty_as(x, condition.shape(), x.dtype());
    kernels::copy(condition, values);
    return values;
  }
  static Tensor inverse(const Tensor& yes) {
    Tensor no = Tensor::empty_like(yes);
    kernels::affine(yes, -1.0, 1.0, no);
    return no;
  }
};

// The gradient passes where the value stayed, at both ends too.
struct Clamp {
  static constexpr OpInfo kInfo{"clamp"};
  double low, high;
  Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    Tensor y = Tensor::empty_like(x);
    kernels::binary(BinaryOp::maximum, x, end(low, x), y);
    kernels::binary(BinaryOp::minimum, y, end(high, x), y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), inside = Tensor::empty_like(x);
    kernels::binary(BinaryOp::ge, x, end(low, x), inside);
    kernels::binary(BinaryOp::mask, product(BinaryOp::le, x, end(high, x)), inside, inside);
    kernels::binary(BinaryOp::mask, dy, inside, inside);
    return {inside};
  }

 private:
  static Tensor end(double value, const Tensor& x) {
    return Tensor::full({}, value, x.dtype(), x.device());
  }
};

// With r = a^2 + b^2: da = dy b / r, db = -dy a / r.
struct Atan2 {
  static constexpr OpInfo kInfo{"atan2", CastPolicy::promote};
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    ctx.save(a);
    ctx.save(b);
    return broadcast_binary(BinaryOp::atan2, kInfo.name, a, b, a.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor a = ctx.saved(0), b = ctx.saved(1);
    const Tensor wide_a = to_wide(a), wide_b = to_wide(b);  // squares overflow f16
    const Tensor r = product(BinaryOp::add, product(BinaryOp::mul, wide_a, wide_a),
                             product(BinaryOp::mul, wide_b, wide_b));
    const Tensor over_r = product(BinaryOp::div, to_wide(dy), r);
    Tensors gradients(2);
    if (ctx.needs_grad(0)) gradients[0] = part(ctx, 0, product(BinaryOp::mul, over_r, wide_b));
    if (ctx.needs_grad(1)) {
      gradients[1] = part(ctx, 1, scaled(product(BinaryOp::mul, over_r, wide_a), -1.0));
    }
    return gradients;
  }

 private:
  static Tensor to_wide(const Tensor& x) { return in_dtype(x, wide(x.dtype())); }
  static Tensor in_dtype(const Tensor& x, DType dtype) {
    if (x.dtype() == dtype) return x;
    Tensor y = empty_as(x, x.shape(), dtype);
    kernels::copy(x, y);
    return y;
  }
  static Tensor part(Context& ctx, int input, const Tensor& gradient) {
    return sum_to_input(ctx, input, in_dtype(gradient, ctx.input_dtype(input)));
  }
};

struct Compare {
  static constexpr OpInfo kInfo{"compare", CastPolicy::promote};
  BinaryOp op;
  Tensor forward(Context&, const Tensor& a, const Tensor& b) {
    return broadcast_binary(op, kInfo.name, a, b, DType::boolean);
  }
  Tensors backward(Context&, const Tensor&) { return Tensors(2); }
};

struct Affine {
  static constexpr OpInfo kInfo{"affine", CastPolicy::keep};
  double scale, shift;
  Tensor forward(Context&, const Tensor& x) {
    Tensor y = Tensor::empty_like(x);
    kernels::affine(x, scale, shift, y);
    return y;
  }
  Tensors backward(Context&, const Tensor& dy) {
    if (scale == 1.0) return {dy};
    const Tensor dx = reuse_or_new(dy, dy);
    kernels::affine(dy, scale, 0.0, dx);
    return {dx};
  }
};

struct Pow {
  static constexpr OpInfo kInfo{"pow", CastPolicy::f32};
  double exponent;
  Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    Tensor y = Tensor::empty_like(x);
    kernels::pow_scalar(x, exponent, y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0);
    const Tensor dx = Tensor::empty_like(x);
    if (exponent == 0.0) {  // 0 * x^-1 would be NaN at 0
      kernels::fill(dx, 0.0);
      return {dx};
    }
    kernels::pow_scalar(x, exponent - 1.0, dx);
    kernels::affine(dx, exponent, 0.0, dx);
    kernels::binary(BinaryOp::mul, dy, dx, dx);
    return {dx};
  }
};

// da = dy b a^(b - 1), db = dy y log a; db is 0 where a is.
struct PowTensor {
  static constexpr OpInfo kInfo{"pow", CastPolicy::f32};
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    CAIRN_CHECK(b.defined() && a.dtype() == b.dtype(), kInfo.name,
                "expected base and exponent of one dtype, got ", a.dtype(), " and ",
                b.defined() ? core::str(b.dtype()) : "none");
    Tensor y = broadcast_binary(BinaryOp::pow, kInfo.name, a, b, a.dtype());
    for (const Tensor& saved : {a, b, ctx.needs_grad(1) ? y : Tensor()}) ctx.save(saved);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor a = ctx.saved(0), b = ctx.saved(1);
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      const Tensor less = Tensor::empty_like(b);
      kernels::affine(b, 1.0, -1.0, less);
      const Tensor slope = product(BinaryOp::mul, b, product(BinaryOp::pow, a, less));
      gradients[0] = sum_to_input(ctx, 0, product(BinaryOp::mul, dy, slope));
    }
    if (ctx.needs_grad(1)) {
      const Tensor safe = Tensor::empty_like(a);  // a, and 1 for 0
      kernels::binary(BinaryOp::eq, a, Tensor::zeros({}, a.dtype(), a.device()), safe);
      kernels::axpby(1.0, a, 1.0, safe);
      kernels::unary(kernels::UnaryOp::log, safe, safe);
      const Tensor slope = product(BinaryOp::mul, ctx.saved(2), safe);
      gradients[1] = sum_to_input(ctx, 1, product(BinaryOp::mul, dy, slope));
    }
    return gradients;
  }
};

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) {
  return apply(Add{}, a, b);
}
Tensor sub(const Tensor& a, const Tensor& b) {
  return apply(Sub{}, a, b);
}
Tensor mul(const Tensor& a, const Tensor& b) {
  return apply(Mul{}, a, b);
}
Tensor div(const Tensor& a, const Tensor& b) {
  return apply(Div{}, a, b);
}
Tensor maximum(const Tensor& a, const Tensor& b) {
  return apply(Extremum<true>{}, a, b);
}
Tensor minimum(const Tensor& a, const Tensor& b) {
  return apply(Extremum<false>{}, a, b);
}
Tensor add_relu(const Tensor& a, const Tensor& b) {
  return apply(AddRelu{}, a, b);
}
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return apply(Where{condition}, a, b);
}
Tensor clamp(const Tensor& x, double low, double high) {
  CAIRN_CHECK(low <= high, "clamp", "expected low <= high, got ", low, " and ", high);
  return apply(Clamp{low, high}, x);
}
Tensor atan2(const Tensor& a, const Tensor& b) {
  return apply(Atan2{}, a, b);
}
Tensor compare(BinaryOp op, const Tensor& a, const Tensor& b) {
  const bool compares = op == BinaryOp::eq || op == BinaryOp::ne || op == BinaryOp::lt ||
                        op == BinaryOp::le || op == BinaryOp::gt || op == BinaryOp::ge;
  CAIRN_CHECK(compares, "compare", "expected eq, ne, lt, le, gt or ge, got ", static_cast<int>(op));
  return apply(Compare{op}, a, b);
}
Tensor eq(const Tensor& a, const Tensor& b) {
  return compare(BinaryOp::eq, a, b);
}
Tensor ne(const Tensor& a, const Tensor& b) {
  return compare(BinaryOp::ne, a, b);
}
Tensor lt(const Tensor& a, const Tensor& b) {
  return compare(BinaryOp::lt, a, b);
}
Tensor le(const Tensor& a, const Tensor& b) {
  return compare(BinaryOp::le, a, b);
}
Tensor gt(const Tensor& a, const Tensor& b) {
  return compare(BinaryOp::gt, a, b);
}
Tensor ge(const Tensor& a, const Tensor& b) {
  return compare(BinaryOp::ge, a, b);
}
Tensor affine(const Tensor& x, double scale, double shift) {
  return apply(Affine{scale, shift}, x);
}
Tensor pow(const Tensor& x, const Tensor& exponent) {
  return apply(PowTensor{}, x, exponent);
}
Tensor pow(const Tensor& x, double exponent) {
  return apply(Pow{exponent}, x);
}

}  // namespace cairn::autograd

namespace cairn::core {

Tensor operator+(const Tensor& a, const Tensor& b) {
  return autograd::add(a, b);
}
Tensor operator-(const Tensor& a, const Tensor& b) {
  return autograd::sub(a, b);
}
Tensor operator*(const Tensor& a, const Tensor& b) {
  return autograd::mul(a, b);
}
Tensor operator/(const Tensor& a, const Tensor& b) {
  return autograd::div(a, b);
}
Tensor operator+(const Tensor& a, double b) {
  return autograd::affine(a, 1.0, b);
}
Tensor operator-(const Tensor& a, double b) {
  return autograd::affine(a, 1.0, -b);
}
Tensor operator*(const Tensor& a, double b) {
  return autograd::affine(a, b, 0.0);
}
Tensor operator/(const Tensor& a, double b) {
  return autograd::affine(a, 1.0 / b, 0.0);
}
Tensor operator*(double a, const Tensor& b) {
  return autograd::affine(b, a, 0.0);
}
Tensor operator-(const Tensor& a) {
  return autograd::affine(a, -1.0, 0.0);
}

}  // namespace cairn::core
