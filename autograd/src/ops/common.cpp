#include "ops/common.h"

#include <algorithm>

namespace cairn::autograd {

using core::TensorView;
using kernels::ReductionKind;

Tensor empty_image(const Tensor& x, const Shape& shape) {
  const bool last = x.view().is_channels_last();
  const Strides strides =
      last ? core::channels_last_strides(shape) : core::contiguous_strides(shape);
  return Tensor::empty_strided(shape, strides, x.dtype(), x.device());
}

Tensor reuse_or_new(const Tensor& dy, const Tensor& x) {
  const bool fits = dy.unique() && dy.strides() == x.strides() && dy.view().is_dense();
  return fits ? dy : Tensor::empty_like(x);
}

Tensor contiguous_data(const Tensor& x) {
  if (x.is_contiguous()) return x;
  Tensor copy = Tensor::empty(x.shape(), x.dtype(), x.device());
  kernels::copy(x, copy);
  return copy;
}

Tensor as_matrix(const Tensor& x) {
  const TensorView view = x.view();
  if (view.dims() == 2) return x;
  const std::int64_t columns = view.dims() == 0 ? 1 : view.size(-1);
  const Shape shape{columns == 0 ? 0 : view.numel() / columns, columns};
  if (view.can_reshape(shape)) return x.alias(view.reshape(shape));
  const Tensor copy = contiguous_data(x);
  return copy.alias(copy.view().reshape(shape));
}

void check_mean(const char* op, Reduction reduction, std::int64_t samples, const Shape& shape) {
  CAIRN_CHECK(reduction != Reduction::mean || samples > 0, op,
              "expected a mean over at least one sample, got none in ", shape,
              " (skip an empty batch; a rank that has run out takes part by ddp.join(), or by "
              "Accumulation with a count of 0 and a loss of Reduction::sum)");
}

Tensor total(ReductionKind op, const Tensor& losses) {
  const Tensor flat = losses.alias(losses.view().reshape({losses.numel()}));
  const Tensor y = empty_as(losses, {1}, losses.dtype());
  kernels::reduce(op, flat, y);
  return y.alias(y.view().reshape({}));
}

std::vector<int> wrap_dims(const std::vector<int>& dims, int count, const char* op) {
  std::vector<int> wrapped;
  wrapped.reserve(dims.size());
  for (int dim : dims) wrapped.push_back(core::wrap_dim(dim, count, op));
  for (int dim = 0; dims.empty() && dim < count; ++dim) wrapped.push_back(dim);
  std::sort(wrapped.begin(), wrapped.end());
  const auto repeated = std::adjacent_find(wrapped.begin(), wrapped.end());
  CAIRN_CHECK(repeated == wrapped.end(), op, "expected different dimensions, got ", *repeated,
              " twice");
  return wrapped;
}

Shape reduced_shape(const Shape& shape, const std::vector<int>& dims) {
  Shape reduced = shape;
  for (int dim : dims) reduced[dim] = 1;
  return reduced;
}

namespace {
TensorView with_leading_ones(TensorView view, int dims) {
  while (view.dims() < dims) view = view.unsqueeze(0);
  return view;
}
}  // namespace

Tensor sum_to_input(Context& ctx, int input, const Tensor& dy) {
  if (dy.shape() == ctx.input_shape(input)) return dy;
  const GradTarget target = ctx.grad_target(input);
  kernels::reduce(ReductionKind::sum, dy, with_leading_ones(target.tensor, dy.dims()),
                  target.accumulate);
  return target.tensor;
}

Tensor land(const GradTarget& target, const Tensor& dy) {
  if (target.accumulate) {
    kernels::axpby(1.0, dy, 1.0, target.tensor);
  } else {
    kernels::copy(dy, target.tensor);
  }
  return target.tensor;
}

}  // namespace cairn::autograd
