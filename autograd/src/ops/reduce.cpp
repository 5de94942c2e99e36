// sum mean max argmax.
#include <numeric>

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::BinaryOp;
using kernels::ReduceOp;

namespace {

// Without the dimensions that were reduced.
Shape dropped(const Shape& shape, const std::vector<int>& dims) {
  Shape rest;
  std::size_t next = 0;
  for (int i = 0; i < shape.dims(); ++i) {
    if (next < dims.size() && dims[next] == i) {
      ++next;
    } else {
      rest.push_back(shape[i]);
    }
  }
  return rest;
}

Tensor reduced(ReduceOp op, const Tensor& x, const std::vector<int>& dims) {
  Tensor y = empty_as(x, reduced_shape(x.shape(), dims), x.dtype());
  kernels::reduce(op, x, y);
  return y;
}

Tensor with_shape(const Tensor& y, const Shape& shape) {
  return y.shape() == shape ? y : y.alias(y.view().reshape(shape));
}

Tensor spread(const Tensor& dy, const Shape& shape) {
  return dy.alias(dy.view().expand(shape));
}

struct Sum {
  static constexpr OpInfo kInfo{"sum", CastPolicy::f32};
  std::vector<int> dims;  // sorted
  bool keep_dims;

  Tensor forward(Context&, const Tensor& x) {
    const Tensor y = reduced(ReduceOp::sum, x, dims);
    return keep_dims ? y : with_shape(y, dropped(x.shape(), dims));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Shape& shape = ctx.input_shape(0);
    const Tensor kept = contiguous_data(dy);
    return {spread(with_shape(kept, reduced_shape(shape, dims)), shape)};
  }
};

struct Mean {
  static constexpr OpInfo kInfo{"mean", CastPolicy::f32};
  std::vector<int> dims;
  bool keep_dims;

  Tensor forward(Context&, const Tensor& x) {
    const Tensor y = reduced(ReduceOp::mean, x, dims);
    return keep_dims ? y : with_shape(y, dropped(x.shape(), dims));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Shape& shape = ctx.input_shape(0);
    double count = 1.0;
    for (int dim : dims) count *= static_cast<double>(shape[dim]);
    const Tensor scaled = empty_as(dy, reduced_shape(shape, dims), dy.dtype());
    kernels::affine(with_shape(contiguous_data(dy), scaled.shape()), 1.0 / count, 0.0, scaled);
    return {spread(scaled, shape)};
  }
};

struct Max {
  static constexpr OpInfo kInfo{"max"};
  std::vector<int> dims;
  bool keep_dims;

  Tensor forward(Context& ctx, const Tensor& x) {
    const Tensor y = reduced(ReduceOp::max, x, dims);
    ctx.save(x);
    ctx.save(y);
    return keep_dims ? y : with_shape(y, dropped(x.shape(), dims));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), y = ctx.saved(1);
    const Tensor dx = Tensor::empty_like(x);
    kernels::binary(BinaryOp::eq, x, y, dx);
    const Tensor count = reduced(ReduceOp::sum, dx, dims);
    const Tensor share = Tensor::empty_like(count);
    kernels::binary(BinaryOp::div, with_shape(contiguous_data(dy), y.shape()), count, share);
    kernels::binary(BinaryOp::mul, dx, share, dx);
    return {dx};
  }
};

// From D .. 1 over the last dimension: the largest entry of [x == max] * weight stands first.
struct Argmax {
  static constexpr OpInfo kInfo{"argmax"};
  Tensor forward(Context&, const Tensor& x) {
    CAIRN_CHECK(x.dims() > 0 && x.size(-1) > 0, kInfo.name,
                "expected a last dimension with elements, got ", x.shape());
    const std::int64_t D = x.size(-1);
    CAIRN_CHECK(D <= (1 << 24), kInfo.name, "expected at most 2^24 elements a row, got ", D);
    const std::vector<int> last{x.dims() - 1};
    const Tensor equal = empty_as(x, x.shape(), DType::boolean);
    kernels::binary(BinaryOp::eq, x, reduced(ReduceOp::max, x, last), equal);
    const Tensor score = empty_as(x, x.shape(), DType::f32);
    kernels::copy(equal, score);
    std::vector<float> weights(static_cast<std::size_t>(D));
    std::iota(weights.rbegin(), weights.rend(), 1.0f);
    kernels::binary(BinaryOp::mul, score, Tensor::from(weights, {D}, DType::f32, x.device()),
                    score);
    const Tensor best = reduced(ReduceOp::max, score, last);
    const Tensor floor = Tensor::full({1}, 1.0, DType::f32, x.device());  // a row of NaN: the last
    kernels::binary(BinaryOp::maximum, best, floor, best);
    kernels::affine(best, -1.0, static_cast<double>(D), best);
    Tensor index = empty_as(x, dropped(x.shape(), last), DType::i64);
    kernels::copy(with_shape(best, index.shape()), index);
    return index;
  }
  Tensors backward(Context&, const Tensor&) { return Tensors(1); }
};

}  // namespace

Tensor sum(const Tensor& x, const std::vector<int>& dims, bool keep_dims) {
  return apply(Sum{wrap_dims(dims, x.dims(), "sum"), keep_dims}, x);
}
Tensor mean(const Tensor& x, const std::vector<int>& dims, bool keep_dims) {
  return apply(Mean{wrap_dims(dims, x.dims(), "mean"), keep_dims}, x);
}
Tensor max(const Tensor& x, const std::vector<int>& dims, bool keep_dims) {
  return apply(Max{wrap_dims(dims, x.dims(), "max"), keep_dims}, x);
}
Tensor argmax(const Tensor& x) {
  return apply(Argmax{}, x);
}
Tensor argmin(const Tensor& x) {
  return argmax(neg(x.detach()));
}

}  // namespace cairn::autograd
