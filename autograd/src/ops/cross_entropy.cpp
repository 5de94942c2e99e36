// cross_entropy, and the same of a linear layer's output without that output in memory.
#include <algorithm>

#include "cairn/autograd/ops.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/matmul.h"
#include "ops/common.h"

namespace cairn::autograd {

using core::TensorView;
using kernels::BinaryOp;
using kernels::ReductionKind;

namespace {

kernels::CrossEntropyOptions kernel_options(const CrossEntropyOptions& options) {
  return {.ignore_index = options.ignore_index, .label_smoothing = options.label_smoothing};
}

/// The targets of rows [N] of logits [..., V], whose shape names the leading dimensions.
Tensor targets_of_rows(const char* op, const Shape& logits, const Tensor& target) {
  CAIRN_CHECK(logits.dims() >= 1 && target.defined(), op,
              "expected logits [..., V] and targets, got logits ", logits);
  const Shape rows(logits.begin(), logits.end() - 1);
  CAIRN_CHECK(target.shape() == rows && target.dtype() == DType::i64, op,
              "expected i64 targets of shape ", rows, " for logits ", logits, ", got ",
              target.dtype(), " ", target.shape());
  const Tensor whole = contiguous_data(target);
  return whole.alias(whole.view().reshape({target.numel()}));
}

/// How many targets count, as a scalar of the losses' dtype, where a mean is asked for.
Tensor counted(const CrossEntropyOptions& options, const Tensor& classes, DType dtype) {
  if (options.reduction != Reduction::mean) return {};
  const Tensor ignored =
      Tensor::full({1}, static_cast<double>(options.ignore_index), DType::i64, classes.device());
  const Tensor counts = empty_as(classes, classes.shape(), DType::boolean);
  kernels::binary(BinaryOp::ne, classes, ignored, counts);
  const Tensor ones = empty_as(classes, classes.shape(), dtype);
  kernels::copy(counts, ones);
  return total(ReductionKind::sum, ones);
}

Tensor reduced(const CrossEntropyOptions& options, const Tensor& losses, const Tensor& count,
               const Shape& rows) {
  if (options.reduction == Reduction::none) return losses.alias(losses.view().reshape(rows));
  Tensor sum = total(ReductionKind::sum, losses);
  if (count.defined()) kernels::binary(BinaryOp::div, sum, count, sum);
  return sum;
}

/// dloss [N] from dy: every row's own, or one for all.
Tensor row_weights(const Tensor& dy, const Tensor& count, std::int64_t N) {
  const Tensor whole = contiguous_data(dy);
  if (whole.dims() > 0) return whole.alias(whole.view().reshape({N}));
  Tensor weight = whole;
  if (count.defined()) {
    weight = Tensor::empty_like(whole);
    kernels::binary(BinaryOp::div, whole, count, weight);
  }
  return weight.alias(weight.view().expand({N}));
}

// The policy is keep, although the arithmetic is f32: the kernel widens half logits as it reads
// them, which saves an f32 copy of the largest tensor of a language model.
struct CrossEntropy {
  static constexpr OpInfo kInfo{"cross_entropy"};
  CrossEntropyOptions options;

  Tensor forward(Context& ctx, const Tensor& logits, const Tensor& target) {
    const Tensor classes = targets_of_rows(kInfo.name, logits.shape(), target);
    check_mean(kInfo.name, options.reduction, target.numel(), logits.shape());
    const Tensor rows = as_matrix(logits);
    const Tensor losses = empty_as(logits, {rows.size(0)}, wide(logits.dtype()));
    const Tensor lse = Tensor::empty_like(losses);
    kernels::cross_entropy(rows, classes, losses, lse, kernel_options(options));
    const Tensor count = counted(options, classes, losses.dtype());
    for (const Tensor& saved : {rows, classes, lse, count}) ctx.save(saved);
    return reduced(options, losses, count, target.shape());
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    // The gradient takes the logits' place where nobody else has them.
    const Tensor rows = ctx.take_saved(0);
    const Tensor dx = reuse_or_new(rows, rows);
    const Tensor dloss = row_weights(dy, ctx.saved(3), rows.size(0));
    kernels::cross_entropy_backward(rows, ctx.saved(1), ctx.saved(2), dloss, dx,
                                    kernel_options(options));
    return {dx.alias(dx.view().reshape(ctx.input_shape(0))), {}};
  }
};

/// Where the gradients of a product's operands are summed, or, from the first chunk on, added to
/// what is there. Undefined: not wanted.
struct ProductGradients {
  GradTarget dx, dweight, dbias;
};

/// How many rows or columns of a product's output, of so many elements each, some megabytes hold.
std::int64_t lines_at_once(const Tensor& x, std::int64_t elements) {
  const std::int64_t bytes = std::int64_t{x.device().is_cpu() ? 32 : 256} << 20;
  const std::int64_t line = elements * static_cast<std::int64_t>(core::size_of(x.dtype()));
  return std::max<std::int64_t>(64, bytes / std::max<std::int64_t>(1, line));
}

/// The rows of a product's output come and go in chunks of some megabytes, of which each operation
/// takes the next from the cache, on a GPU from memory that the next chunk uses again.
class ChunkedRows {
 public:
  ChunkedRows(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& classes,
              const kernels::CrossEntropyOptions& options)
      : x_(x), weight_(weight), bias_(bias), classes_(classes), options_(options) {
    height_ = std::min(x.size(0), lines_at_once(x, weight.size(0)));
    const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
    logits_ = empty_as(x, {height_, weight.size(0)}, x.dtype());
  }

  /// Writes losses and lse [N]; with gradients, adds those of sum(dloss * losses) too.
  void forward(const Tensor& losses, const Tensor& lse, const TensorView& dloss,
               const ProductGradients* gradients) {
    each([&](std::int64_t begin, std::int64_t end, const TensorView& logits) {
      const TensorView classes = classes_.view().slice(0, begin, end);
      kernels::cross_entropy(logits, classes, losses.view().slice(0, begin, end),
                             lse.view().slice(0, begin, end), options_);
      if (gradients != nullptr) differentiate(begin, end, logits, lse, dloss, *gradients);
    });
  }

 private:
  template <class Visit>
  void each(Visit visit) {
    for (std::int64_t begin = 0; begin < x_.size(0); begin += height_) {
      const std::int64_t end = std::min(begin + height_, x_.size(0));
      const TensorView logits = logits_.view().slice(0, 0, end - begin);
      kernels::MatmulOptions product;
      if (bias_.defined()) product.bias = bias_;
      kernels::matmul(x_.view().slice(0, begin, end), weight_.view().transpose(0, 1), logits,
                      product);
      visit(begin, end, logits);
    }
  }

  // The logits' gradient takes their place.
  void differentiate(std::int64_t begin, std::int64_t end, const TensorView& logits,
                     const Tensor& lse, const TensorView& dloss,
                     const ProductGradients& gradients) {
    kernels::cross_entropy_backward(logits, classes_.view().slice(0, begin, end),
                                    lse.view().slice(0, begin, end), dloss.slice(0, begin, end),
                                    logits, options_);
    const auto& [dx, dweight, dbias] = gradients;
    if (dx.tensor.defined()) {
      kernels::matmul(logits, weight_, dx.tensor.view().slice(0, begin, end));
    }
    if (dweight.tensor.defined()) {
      kernels::matmul(logits.transpose(0, 1), x_.view().slice(0, begin, end), dweight.tensor,
                      {.accumulate = dweight.accumulate || begin > 0});
    }
    if (dbias.tensor.defined()) {
      kernels::reduce(ReductionKind::sum, logits, dbias.tensor.view().unsqueeze(0),
                      dbias.accumulate || begin > 0);
    }
  }

  const Tensor &x_, &weight_, &bias_, &classes_;
  kernels::CrossEntropyOptions options_;
  std::int64_t height_;
  Tensor logits_;
};

/// The gradients of sum(dloss * losses) from logits that are made once more, of some classes at a
/// time and of all rows: every row of the weight has its gradient whole, in its place.
class ClassSlices {
 public:
  ClassSlices(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& classes,
              const kernels::CrossEntropyOptions& options)
      : x_(x), weight_(weight), bias_(bias), classes_(classes), options_(options) {
    width_ = std::min(weight.size(0), lines_at_once(x, x.size(0)));
    const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
    logits_ = empty_as(x, {x.size(0) * width_}, x.dtype());
  }

  /// dx.tensor is of the sums' dtype.
  void backward(const Tensor& lse, const TensorView& dloss, const ProductGradients& gradients) {
    for (std::int64_t begin = 0; begin < weight_.size(0); begin += width_)
      backward(begin, std::min(begin + width_, weight_.size(0)), lse, dloss, gradients);
  }

 private:
  void backward(std::int64_t begin, std::int64_t end, const Tensor& lse, const TensorView& dloss,
                const ProductGradients& gradients) {
    const std::int64_t rows = x_.size(0);
    const TensorView logits =
        logits_.view().slice(0, 0, rows * (end - begin)).reshape({rows, end - begin});
    const TensorView weight = weight_.view().slice(0, begin, end);
    kernels::MatmulOptions product;
    if (bias_.defined()) product.bias = bias_.view().slice(0, begin, end);
    kernels::matmul(x_, weight.transpose(0, 1), logits, product);
    kernels::cross_entropy_backward(logits, classes_, lse, dloss, logits, options_,
                                    kernels::ClassSlice{begin, weight_.size(0)});
    const auto& [dx, dweight, dbias] = gradients;
    if (dx.tensor.defined()) kernels::matmul(logits, weight, dx.tensor, {.accumulate = begin > 0});
    if (dweight.tensor.defined())
      kernels::matmul(logits.transpose(0, 1), x_, dweight.tensor.view().slice(0, begin, end),
                      {.accumulate = dweight.accumulate});
    if (dbias.tensor.defined())
      kernels::reduce(ReductionKind::sum, logits,
                      dbias.tensor.view().slice(0, begin, end).unsqueeze(0), dbias.accumulate);
  }

  const Tensor &x_, &weight_, &bias_, &classes_;
  kernels::CrossEntropyOptions options_;
  std::int64_t width_;
  Tensor logits_;
};

/// Forward makes the gradients at once, as of a sum of losses, each chunk of logits being there;
/// backward multiplies them by what the sum's gradient is. Where every row has a gradient of its
/// own, or `recompute` asks for it, backward makes the logits once more instead.
struct LinearCrossEntropy {
  static constexpr OpInfo kInfo{"linear_cross_entropy", CastPolicy::half};
  CrossEntropyOptions options;
  bool recompute;

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& target) {
    check(x, weight, bias);
    Shape logits = x.shape();
    logits[logits.dims() - 1] = weight.size(0);
    const Tensor classes = targets_of_rows(kInfo.name, logits, target);
    check_mean(kInfo.name, options.reduction, target.numel(), x.shape());
    const Tensor rows = as_matrix(x);
    const Tensor losses = empty_as(x, {rows.size(0)}, wide(x.dtype()));
    const Tensor lse = Tensor::empty_like(losses);
    ChunkedRows chunks(rows, weight, bias, classes, kernel_options(options));
    const Tensor count = counted(options, classes, losses.dtype());
    ctx.save(count);
    if (ctx.recording() && !remakes()) {
      const Tensor dloss = Tensor::full({1}, headroom(x.dtype()), losses.dtype(), x.device());
      const ProductGradients g = kept(ctx, rows, weight);
      chunks.forward(losses, lse, dloss.view().expand({rows.size(0)}), &g);
      for (const GradTarget* sum : {&g.dx, &g.dweight, &g.dbias}) ctx.save(sum->tensor);
    } else {
      chunks.forward(losses, lse, {}, nullptr);
      for (const Tensor& saved : {rows, weight, bias, classes, lse}) ctx.save(saved);
    }
    return reduced(options, losses, count, target.shape());
  }

  Tensors backward(Context& ctx, const Tensor& dy) {
    return remakes() ? remade(ctx, dy) : scaled(ctx, dy);
  }

 private:
  bool remakes() const { return recompute || options.reduction == Reduction::none; }

  static void check(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    CAIRN_CHECK(weight.defined() && weight.dims() == 2, kInfo.name, "expected weight [V, C], got ",
                weight.defined() ? core::str(weight.shape()) : "none");
    CAIRN_CHECK(x.dims() >= 1 && x.size(-1) == weight.size(1), kInfo.name, "expected x [..., ",
                weight.size(1), "] for weight ", weight.shape(), ", got ", x.shape());
    const bool fits = !bias.defined() || bias.shape() == Shape{weight.size(0)};
    CAIRN_CHECK(fits, kInfo.name, "expected bias [", weight.size(0), "], got ", bias.shape());
  }

  // The logits' gradients of a sum lie in -1..1. In f16, what is small among them survives where
  // all are larger; the sums of their products are f32.
  static double headroom(DType dtype) { return dtype == DType::f16 ? 256.0 : 1.0; }

  // Zeros, which an empty batch leaves.
  static GradTarget sums(const Tensor& like, const Shape& shape) {
    return {Tensor::zeros(shape, wide(like.dtype()), like.device())};
  }

  static ProductGradients kept(const Context& ctx, const Tensor& rows, const Tensor& weight) {
    ProductGradients g;
    if (ctx.needs_grad(0)) g.dx = {empty_as(rows, rows.shape(), wide(rows.dtype()))};
    if (ctx.needs_grad(1)) g.dweight = sums(rows, weight.shape());
    if (ctx.needs_grad(2)) g.dbias = sums(rows, {weight.size(0)});
    return g;
  }

  // Where every row is ignored, the sums are 0 and so is their gradient: as with the logits', whose
  // kernel never looks at an ignored row's weight.
  static Tensor at_least_one(const Tensor& count) {
    if (!count.defined()) return count;
    Tensor one = Tensor::full(count.shape(), 1.0, count.dtype(), count.device());
    kernels::binary(BinaryOp::maximum, count, one, one);
    return one;
  }

  Tensors scaled(Context& ctx, const Tensor& dy) const {
    const Tensor factor = row_weights(dy, at_least_one(ctx.saved(0)), 1);
    const Tensor whole = Tensor::empty_like(factor);
    kernels::affine(factor, 1.0 / headroom(ctx.input_dtype(0)), 0.0, whole);
    Tensors gradients(4);
    for (int i = 0; i < 3; ++i) {
      if (!ctx.needs_grad(i)) continue;
      const Tensor sum = ctx.take_saved(1 + i);
      const Tensor product = reuse_or_new(sum, sum);
      kernels::binary(BinaryOp::mul, sum, whole, product);
      gradients[static_cast<std::size_t>(i)] =
          land(ctx, i, product.alias(product.view().reshape(ctx.input_shape(i))));
    }
    return gradients;
  }

  Tensors remade(Context& ctx, const Tensor& dy) const {
    const Tensor rows = ctx.saved(1), weight = ctx.saved(2), bias = ctx.saved(3);
    const Tensor classes = ctx.saved(4), lse = ctx.saved(5);
    const Tensor dloss = row_weights(dy, ctx.saved(0), rows.size(0));
    ProductGradients g;
    if (ctx.needs_grad(0)) g.dx = {empty_as(rows, rows.shape(), wide(rows.dtype()))};
    if (ctx.needs_grad(1)) g.dweight = ctx.grad_target(1);
    if (ctx.needs_grad(2)) g.dbias = ctx.grad_target(2);
    if (rows.size(0) == 0) return of_no_rows(ctx, g);
    ClassSlices(rows, weight, bias, classes, kernel_options(options)).backward(lse, dloss, g);
    return landed(ctx, g);
  }

  static Tensors landed(Context& ctx, const ProductGradients& g) {
    Tensor dx = g.dx.tensor;
    if (dx.defined()) dx = land(ctx, 0, dx.alias(dx.view().reshape(ctx.input_shape(0))));
    return {dx, g.dweight.tensor, g.dbias.tensor, {}};
  }
  static Tensors of_no_rows(Context& ctx, const ProductGradients& g) {
    for (const GradTarget* sum : {&g.dx, &g.dweight, &g.dbias}) {
      if (sum->tensor.defined() && !sum->accumulate) kernels::fill(sum->tensor, 0.0);
    }
    return landed(ctx, g);
  }
};

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& target,
                     const CrossEntropyOptions& options) {
  return apply(CrossEntropy{options}, logits, target);
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& target, const CrossEntropyOptions& options,
                            bool recompute) {
  return apply(LinearCrossEntropy{options, recompute}, x, weight, bias, target);
}

}  // namespace cairn::autograd
