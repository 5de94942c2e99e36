// sum mean max argmax topk cumsum.
#include "cairn/kernels/sort_scan.h"

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::BinaryOp;
using kernels::ReductionKind;

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

Tensor reduced(ReductionKind op, const Tensor& x, const std::vector<int>& dims) {
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
    const Tensor y = reduced(ReductionKind::sum, x, dims);
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
    const Tensor y = reduced(ReductionKind::mean, x, dims);
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
    const Tensor y = reduced(ReductionKind::max, x, dims);
    ctx.save(x);
    ctx.save(y);
    return keep_dims ? y : with_shape(y, dropped(x.shape(), dims));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor x = ctx.saved(0), y = ctx.saved(1);
    const Tensor dx = Tensor::empty_like(x);
    kernels::binary(BinaryOp::eq, x, y, dx);
    const Tensor count = reduced(ReductionKind::sum, dx, dims);
    const Tensor share = Tensor::empty_like(count);
    kernels::binary(BinaryOp::div, with_shape(contiguous_data(dy), y.shape()), count, share);
    kernels::binary(BinaryOp::mul, dx, share, dx);
    return {dx};
  }
};

// Where the k first of each row's elements are, [..., k].
Tensor ranked(const Tensor& x, std::int64_t k, bool largest) {
  const Tensor rows = as_matrix(x), index = empty_as(x, {rows.size(0), k}, DType::i64);
  kernels::topk(rows, index, largest);
  Shape shape = x.shape();
  shape[x.dims() - 1] = k;
  return with_shape(index, shape);
}

struct Argmax {
  static constexpr OpInfo kInfo{"argmax"};
  Tensor forward(Context&, const Tensor& x) {
    CAIRN_CHECK(x.dims() > 0 && x.size(-1) > 0, kInfo.name,
                "expected a last dimension with elements, got ", x.shape());
    return with_shape(ranked(x, 1, true), dropped(x.shape(), {x.dims() - 1}));
  }
  Tensors backward(Context&, const Tensor&) { return Tensors(1); }
};

struct Ranking {
  static constexpr OpInfo kInfo{"topk"};
  std::int64_t k;
  bool largest;
  Tensor forward(Context&, const Tensor& x) {
    CAIRN_CHECK(x.dims() > 0 && k >= 0 && k <= x.size(-1), kInfo.name,
                "expected x [..., V] and k in 0..V, got ", x.shape(), " and ", k);
    return ranked(x, k, largest);
  }
  Tensors backward(Context&, const Tensor&) { return Tensors(1); }
};

struct Cumsum {
  static constexpr OpInfo kInfo{"cumsum", CastPolicy::f32};
  int dim;
  Tensor forward(Context&, const Tensor& x) { return running(x, false); }
  Tensors backward(Context&, const Tensor& dy) { return {running(dy, true)}; }

 private:
  Tensor running(const Tensor& x, bool reverse) const {
    Tensor y = Tensor::empty_like(x);
    kernels::cumsum(x.view().transpose(dim, -1), y.view().transpose(dim, -1), reverse);
    return y;
  }
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
TopK topk(const Tensor& x, std::int64_t k, bool largest) {
  const Tensor index = apply(Ranking{k, largest}, x);
  return {gather(x, index), index};
}
Tensor cumsum(const Tensor& x, int dim) {
  return apply(Cumsum{core::wrap_dim(dim, x.dims(), "cumsum")}, x);
}
Tensor argmin(const Tensor& x) {
  return argmax(neg(x.detach()));
}

}  // namespace cairn::autograd
