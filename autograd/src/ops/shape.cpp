// reshape flatten transpose permute expand slice concat stack contiguous channels_last.
#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;

namespace {

// Sizes with -1 worked out; throws where they do not fit.
Shape resolved(const Shape& shape, std::int64_t numel) {
  const TensorView probe(nullptr, Shape{numel}, DType::u8);
  return probe.reshape(shape).shape;
}

Tensor copied(const TensorView& x, const Shape& shape, const Strides& strides) {
  Tensor y = Tensor::empty_strided(shape, strides, x.dtype, x.device);
  kernels::copy(x, y);
  return y;
}

struct Reshape {
  static constexpr OpInfo kInfo{"reshape"};
  Shape shape;
  bool copies = false;

  Tensor forward(Context&, const Tensor& x) {
    const TensorView view = x.view();
    copies = !view.can_reshape(shape);
    if (!copies) return x.alias(view.reshape(shape));
    const Tensor y = contiguous_data(x);
    return y.alias(y.view().reshape(shape));
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Shape& before = ctx.input_shape(0);
    const Tensor whole = dy.view().can_reshape(before) ? dy : contiguous_data(dy);
    const TensorView dx = whole.view().reshape(before);
    if (!copies) return {whole.alias(dx)};
    const Tensor in_layout = ctx.new_gradient(0);  // channels-last images stay so on the way back
    kernels::copy(dx, in_layout);
    return {in_layout};
  }
};

struct Transpose {
  static constexpr OpInfo kInfo{"transpose"};
  int dim0, dim1;
  Tensor forward(Context&, const Tensor& x) { return x.alias(x.view().transpose(dim0, dim1)); }
  Tensors backward(Context&, const Tensor& dy) {
    return {dy.alias(dy.view().transpose(dim0, dim1))};
  }
};

struct Permute {
  static constexpr OpInfo kInfo{"permute"};
  Shape order;
  Tensor forward(Context&, const Tensor& x) { return x.alias(x.view().permute(order)); }
  Tensors backward(Context&, const Tensor& dy) {
    Shape inverse = order;
    for (int i = 0; i < order.dims(); ++i) {
      inverse[core::wrap_dim(static_cast<int>(order[i]), order.dims(), kInfo.name)] = i;
    }
    return {dy.alias(dy.view().permute(inverse))};
  }
};

struct Expand {
  static constexpr OpInfo kInfo{"expand"};
  Shape shape;
  Tensor forward(Context&, const Tensor& x) { return x.alias(x.view().expand(shape)); }
  Tensors backward(Context& ctx, const Tensor& dy) { return {sum_to_input(ctx, 0, dy)}; }
};

struct Slice {
  static constexpr OpInfo kInfo{"slice"};
  int dim;
  std::int64_t begin, end;
  Tensor forward(Context&, const Tensor& x) { return x.alias(x.view().slice(dim, begin, end)); }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const GradTarget target = ctx.grad_target(0);
    const TensorView part = target.tensor.view().slice(dim, begin, end);
    if (target.accumulate) {
      kernels::axpby(1.0, dy, 1.0, part);
    } else {
      kernels::fill(target.tensor, 0.0);
      kernels::copy(dy, part);
    }
    return {target.tensor};
  }
};

struct Concat {
  static constexpr OpInfo kInfo{"concat", CastPolicy::promote};
  int dim;
  std::vector<std::int64_t> sizes = {};

  Tensor forward(Context&, const Tensors& xs) {
    Shape shape = xs[0].shape();
    shape[dim] = 0;
    for (const Tensor& x : xs) {
      Shape rest = x.shape();
      CAIRN_CHECK(rest.dims() == shape.dims(), kInfo.name, "expected inputs of ", shape.dims(),
                  " dimensions, got ", x.shape());
      sizes.push_back(rest[dim]);
      const std::int64_t total = shape[dim] + rest[dim];
      rest[dim] = shape[dim];
      CAIRN_CHECK(rest == shape, kInfo.name, "expected inputs that differ in dimension ", dim,
                  " only, got ", xs[0].shape(), " and ", x.shape());
      shape[dim] = total;
    }
    Tensor y = empty_image(xs[0], shape);
    std::int64_t at = 0;
    for (const Tensor& x : xs) {
      kernels::copy(x, y.view().slice(dim, at, at + x.size(dim)));
      at += x.size(dim);
    }
    return y;
  }
  Tensors backward(Context&, const Tensor& dy) {
    Tensors gradients;
    std::int64_t at = 0;
    for (std::int64_t size : sizes) {
      gradients.push_back(dy.alias(dy.view().slice(dim, at, at + size)));
      at += size;
    }
    return gradients;
  }
};

struct Stack {
  static constexpr OpInfo kInfo{"stack", CastPolicy::promote};
  int dim;

  Tensor forward(Context&, const Tensors& xs) {
    for (const Tensor& x : xs) {
      CAIRN_CHECK(x.defined() && x.shape() == xs[0].shape(), kInfo.name,
                  "expected inputs of one shape, got ", xs[0].shape(), " and ",
                  x.defined() ? core::str(x.shape()) : "none");
    }
    Shape shape;
    for (int d = 0; d <= xs[0].dims(); ++d) {
      shape.push_back(d == dim ? static_cast<std::int64_t>(xs.size())
                               : xs[0].shape()[d < dim ? d : d - 1]);
    }
    Tensor y = empty_as(xs[0], shape, xs[0].dtype());
    for (std::size_t i = 0; i < xs.size(); ++i) kernels::copy(xs[i], entry(y, i));
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    Tensors gradients(static_cast<std::size_t>(dy.size(dim)));
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (ctx.needs_grad(static_cast<int>(i))) gradients[i] = dy.alias(entry(dy, i));
    }
    return gradients;
  }

 private:
  TensorView entry(const Tensor& y, std::size_t i) const {
    return y.view().select(dim, static_cast<std::int64_t>(i));
  }
};

// The values do not change, so neither does the gradient, whatever its layout.
struct Relayout {
  static constexpr OpInfo kInfo{"relayout"};
  Strides strides;
  Tensor forward(Context&, const Tensor& x) { return copied(x, x.shape(), strides); }
  Tensors backward(Context&, const Tensor& dy) { return {dy}; }
};

struct CopyTo {
  static constexpr OpInfo kInfo{"copy_to"};
  Device device;
  Tensor forward(Context&, const Tensor& x) {
    const TensorView view = x.view();
    const Strides strides = view.is_dense() ? view.strides : core::contiguous_strides(view.shape);
    Tensor y = Tensor::empty_strided(view.shape, strides, view.dtype, device);
    kernels::copy(view, y);
    return y;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor dx = ctx.new_gradient(0);
    kernels::copy(dy, dx);
    return {dx};
  }
};

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape) {
  return apply(Reshape{resolved(shape, x.numel())}, x);
}

Tensor flatten(const Tensor& x, int start_dim) {
  const int start = core::wrap_dim(start_dim, x.dims(), "flatten");
  Shape shape(x.shape().begin(), x.shape().begin() + start);
  shape.push_back(Shape(x.shape().begin() + start, x.shape().end()).numel());
  return apply(Reshape{shape}, x);
}

Tensor transpose(const Tensor& x, int dim0, int dim1) {
  return apply(Transpose{dim0, dim1}, x);
}
Tensor permute(const Tensor& x, const Shape& order) {
  return apply(Permute{order}, x);
}
Tensor expand(const Tensor& x, const Shape& shape) {
  return apply(Expand{shape}, x);
}
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end) {
  return apply(Slice{dim, begin, end}, x);
}
Tensor select(const Tensor& x, int dim, std::int64_t index) {
  const int at = core::wrap_dim(dim, x.dims(), "select");
  CAIRN_CHECK(index >= 0 && index < x.size(at), "select", "expected an index in 0..",
              x.size(at) - 1, " of dimension ", at, " of ", x.shape(), ", got ", index);
  Shape rest;
  for (int d = 0; d < x.dims(); ++d) {
    if (d != at) rest.push_back(x.size(d));
  }
  return reshape(slice(x, at, index, index + 1), rest);
}
Tensor concat(const std::vector<Tensor>& xs, int dim) {
  CAIRN_CHECK(!xs.empty() && xs[0].defined(), "concat", "expected at least one tensor, got none");
  return apply_list(Concat{core::wrap_dim(dim, xs[0].dims(), "concat")}, xs);
}

Tensor stack(const std::vector<Tensor>& xs, int dim) {
  CAIRN_CHECK(!xs.empty() && xs[0].defined(), "stack", "expected at least one tensor, got none");
  return apply_list(Stack{core::wrap_dim(dim, xs[0].dims() + 1, "stack")}, xs);
}

Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  return apply(Relayout{core::contiguous_strides(x.shape())}, x);
}
Tensor channels_last(const Tensor& x) {
  CAIRN_CHECK(x.dims() == 4, "channels_last", "expected a tensor [N, C, H, W], got ", x.shape());
  if (x.view().is_channels_last()) return x;
  return apply(Relayout{core::channels_last_strides(x.shape())}, x);
}

Tensor to(const Tensor& x, Device device) {
  if (x.device() == device) return x;
  core::check_exists(device);
  return apply(CopyTo{device}, x);
}

}  // namespace cairn::autograd
