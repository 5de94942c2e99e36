// gather, scatter_add, nll_loss: lookups in x [N, V] as a table of N V rows of one element.
#include <vector>

#include "cairn/autograd/ops.h"
#include "cairn/kernels/embedding.h"
#include "ops/common.h"

namespace cairn::autograd {

using kernels::BinaryOp;

namespace {

TensorView as_table(const Tensor& x) {
  return x.view().reshape({x.numel(), 1});
}

Tensor integer_like(const Tensor& x, std::int64_t value) {
  return Tensor::from(std::vector<std::int64_t>{value}, {}, DType::i64, x.device());
}

Tensor integers(BinaryOp op, const Tensor& a, const Tensor& b) {
  Tensor y = empty_as(a, a.shape(), DType::i64);
  kernels::binary(op, a, b, y);
  return y;
}

/// index [N, K]: place i of row n is place n V + i of the table [N K]; -1, which no table has, for
/// an i outside of its row.
Tensor places_in_table(const Tensor& index, std::int64_t V) {
  std::vector<std::int64_t> begins(static_cast<std::size_t>(index.size(0)));
  for (std::size_t n = 0; n < begins.size(); ++n) begins[n] = static_cast<std::int64_t>(n) * V + 1;
  const Tensor begin = Tensor::from(begins, {index.size(0), 1}, DType::i64, index.device());
  const Tensor inside =
      integers(BinaryOp::mul, integers(BinaryOp::ge, index, integer_like(index, 0)),
               integers(BinaryOp::lt, index, integer_like(index, V)));
  const Tensor places = integers(BinaryOp::mul, integers(BinaryOp::add, index, begin), inside);
  kernels::binary(BinaryOp::sub, places, integer_like(index, 1), places);
  return places.alias(places.view().reshape({places.numel()}));
}

Shape rows_of(const Tensor& x) {
  return {x.shape().begin(), x.shape().end() - 1};
}

struct Gather {
  static constexpr OpInfo kInfo{"gather"};

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& index) {
    const bool fits = index.defined() && index.dtype() == DType::i64 && x.dims() >= 1 &&
                      index.dims() == x.dims() && rows_of(index) == rows_of(x);
    CAIRN_CHECK(fits, kInfo.name, "expected x [..., V] and an index [..., K] i64, got ", x.shape(),
                " and ", index.defined() ? core::str(index.dtype(), index.shape()) : "none");
    const Tensor places = places_in_table(as_matrix(index), x.size(-1));
    const Tensor y = empty_as(x, {index.numel(), 1}, x.dtype());
    kernels::embedding(as_table(as_matrix(x)), places, y);
    ctx.save(places);
    return y.alias(y.view().reshape(index.shape()));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = empty_as(dy, ctx.input_shape(0), dy.dtype());
    kernels::embedding_backward(as_table(contiguous_data(dy)), ctx.saved(0), as_table(dx), false);
    return {dx, {}};
  }
};

struct ScatterAdd {
  static constexpr OpInfo kInfo{"scatter_add", CastPolicy::promote};
  Tensor index;  // no input: it stays i64

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& source) {
    const bool fits = index.defined() && index.dtype() == DType::i64 && x.dims() >= 1 &&
                      index.dims() == x.dims() && rows_of(index) == rows_of(x) &&
                      source.shape() == index.shape();
    CAIRN_CHECK(fits, kInfo.name,
                "expected x [..., V], an index [..., K] i64 and a source [..., K], got ", x.shape(),
                ", ", index.defined() ? core::str(index.dtype(), index.shape()) : "none", " and ",
                source.shape());
    const Tensor places = places_in_table(as_matrix(index), x.size(-1));
    Tensor y = empty_as(x, x.shape(), x.dtype());
    kernels::copy(x, y);
    kernels::embedding_backward(as_table(contiguous_data(source)), places, as_table(y), true);
    ctx.save(places);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dsource = empty_as(dy, ctx.input_shape(1), dy.dtype());
    kernels::embedding(as_table(contiguous_data(dy)), ctx.saved(0), as_table(dsource));
    return {dy, dsource};
  }
};

struct Nll {
  static constexpr OpInfo kInfo{"nll_loss", CastPolicy::f32};
  NllOptions options;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& target) {
    const bool fits = target.defined() && target.dtype() == DType::i64 && x.dims() >= 1 &&
                      target.shape() == rows_of(x);
    CAIRN_CHECK(fits, kInfo.name, "expected x [..., V] and a target [...] i64, got ", x.shape(),
                " and ", target.defined() ? core::str(target.dtype(), target.shape()) : "none");
    check_mean(kInfo.name, options.reduction, target.numel(), x.shape());
    const Tensor whole = contiguous_data(target);
    const Tensor labels = whole.alias(whole.view().reshape({target.numel(), 1}));
    const Tensor counts =
        integers(BinaryOp::ne, labels, integer_like(labels, options.ignore_index));
    const Tensor places = places_in_table(integers(BinaryOp::mul, labels, counts), x.size(-1));
    const Tensor picked = empty_as(x, labels.shape(), x.dtype());
    kernels::embedding(as_table(as_matrix(x)), places, picked);
    const Tensor losses = empty_as(x, labels.shape(), wide(x.dtype()));
    const Tensor kept = Tensor::empty_like(losses);  // 1, and 0 for an ignored target
    kernels::copy(counts, kept);
    kernels::affine(picked, -1.0, 0.0, losses);
    kernels::binary(BinaryOp::mask, losses, kept, losses);
    ctx.save(places);
    ctx.save(kept);
    if (options.reduction == Reduction::none) {
      return losses.alias(losses.view().reshape(target.shape()));
    }
    Tensor sum = total(kernels::ReductionKind::sum, losses);
    if (options.reduction == Reduction::mean) divide(sum, kept);
    return sum;
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor places = ctx.saved(0), kept = ctx.saved(1);
    const Tensor weight = Tensor::empty_like(kept);
    const bool each = options.reduction == Reduction::none;
    const Tensor whole = contiguous_data(dy);
    kernels::affine(each ? as_table(whole) : whole.view(), -1.0, 0.0, weight);
    if (options.reduction == Reduction::mean) divide(weight, kept);
    kernels::binary(BinaryOp::mask, weight, kept, weight);
    const Tensor dpicked = empty_as(dy, kept.shape(), ctx.input_dtype(0));
    kernels::copy(weight, dpicked);
    const Tensor dx = empty_as(dy, ctx.input_shape(0), dpicked.dtype());
    kernels::embedding_backward(dpicked, places, as_table(dx), false);
    return {dx, {}};
  }

 private:
  static void divide(const Tensor& x, const Tensor& kept) {
    kernels::binary(BinaryOp::div, x, total(kernels::ReductionKind::sum, kept), x);
  }
};

}  // namespace

Tensor gather(const Tensor& x, const Tensor& index) {
  return apply(Gather{}, x, index);
}

Tensor scatter_add(const Tensor& x, const Tensor& index, const Tensor& source) {
  return apply(ScatterAdd{index}, x, source);
}

Tensor nll_loss(const Tensor& x, const Tensor& target, const NllOptions& options) {
  return apply(Nll{options}, x, target);
}

}  // namespace cairn::autograd
