// Views to products: strides become transposes, leading dimensions one batch; what has no such form
// is copied. What cuBLASLt's epilogue cannot do (the exact gelu, keeping the pre-activation, a bias
// of another dtype) follows as kernels of its own.
#include <optional>

#include "cairn/kernels/tf32.h"
#include "cuda/contiguous.h"
#include "cuda/cublaslt/gemm.h"
#include "cuda/cublaslt/padded_product.h"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

using View = const TensorView&;

std::optional<GemmMatrix> row_major(View x) {
  const std::int64_t rows = x.size(-2), columns = x.size(-1);
  const std::int64_t down = x.strides[x.dims() - 2], along = x.strides[x.dims() - 1];
  if (columns > 1 && along != 1) return {};
  if (rows > 1 && down < columns) return {};
  GemmMatrix matrix;
  matrix.ld = rows > 1 ? down : columns;
  return matrix;
}

/// The largest power of two, up to `most`, that divides the number.
int power_of_two_in(std::uint64_t number, std::uint64_t most) {
  const std::uint64_t bits = number | most;
  return static_cast<int>(bits & (~bits + 1));
}

std::uint64_t address(View x) {
  return reinterpret_cast<std::uintptr_t>(x.data);
}

int alignment_of(View x, std::int64_t batch_stride, std::int64_t ld) {
  const auto bytes = static_cast<std::uint64_t>(core::size_of(x.dtype));
  return power_of_two_in(address(x) | static_cast<std::uint64_t>(batch_stride) * bytes |
                             static_cast<std::uint64_t>(ld) * bytes,
                         16);
}

/// How [batch, R, C] or [R, C] lies in memory; nothing where a copy is needed.
std::optional<GemmMatrix> matrix_of(View x, bool may_transpose) {
  auto matrix = row_major(x);
  if (!matrix && may_transpose) {
    matrix = row_major(x.transpose(-1, -2));
    if (matrix) matrix->transposed = true;
  }
  if (!matrix) return {};
  matrix->batch_stride = x.dims() == 3 && x.shape[0] > 1 ? x.strides[0] : 0;
  matrix->dtype = x.dtype;
  matrix->alignment = alignment_of(x, matrix->batch_stride, matrix->ld);
  return matrix;
}

/// One matmul of at most one batch dimension.
class Product {
 public:
  Product(const CudaBackend& backend, const Queue& queue, View a, View b, View y,
          const MatmulOptions& options)
      : backend_(backend), queue_(queue), y_(y), options_(options) {
    const Input a_in = usable(a), b_in = usable(b);
    shape_.device = queue.device().index;
    shape_.m = y.size(-2), shape_.n = y.size(-1), shape_.k = a.size(-1);
    shape_.batch = y.dims() == 3 ? y.shape[0] : 1;
    shape_.a = *matrix_of(a_in.view(), true), shape_.b = *matrix_of(b_in.view(), true);
    shape_.accumulate = options.accumulate;
    shape_.tf32 = a.dtype == DType::f32 && tf32_allowed();
    run(a_in.view().data, b_in.view().data);
  }

 private:
  Input usable(View x) const {
    if (matrix_of(x, true)) return Input(x);
    return Input(backend_, queue_, x);
  }

  void run(const void* a, const void* b) {
    const bool keeps = options_.pre_activation.defined();
    View target = keeps ? options_.pre_activation : y_;
    shape_.y.dtype = target.dtype;
    TensorView like = target;
    // What kernels of their own add to a product must find it unrounded.
    if (core::is_half(target.dtype) && wants_more(fused()) && !can_fuse(fused()))
      like.dtype = DType::f32;
    const bool fits = like.dtype == target.dtype && matrix_of(target, false).has_value();
    std::optional<Fresh> fresh;
    if (!fits) {
      fresh.emplace(queue_, like, StorageOrder::row_major);
      if (options_.accumulate) backend_.copy(target, fresh->view());
    }
    View sum = fits ? target : fresh->view();
    multiply(a, b, sum);
    if (!fits) backend_.copy(sum, target);
    if (keeps) finish(target);
  }

  /// The product with bias and, unless the pre-activation is kept, activation.
  GemmShape fused() const {
    GemmShape shape = shape_;
    shape.bias = options_.bias.defined() ? power_of_two_in(address(options_.bias), 256) : 0;
    if (!options_.pre_activation.defined()) shape.activation = options_.activation;
    return shape;
  }

  static bool wants_more(const GemmShape& shape) {
    return shape.bias > 0 || shape.activation != Activation::none;
  }

  void multiply(const void* a, const void* b, View sum) {
    shape_.y = *matrix_of(sum, false);
    const GemmPointers pointers{a, b, sum.data, options_.bias.data, options_.alpha};
    const GemmShape whole = fused();
    if (wants_more(whole) && can_fuse(whole) && gemm(queue_, whole, pointers)) return;
    if (!gemm(queue_, shape_, pointers)) {
      core::fail<core::DeviceError>(queue_.op(), "expected cuBLASLt to have an algorithm for [",
                                    shape_.batch, ", ", shape_.m, ", ", shape_.k, "] x [", shape_.k,
                                    ", ", shape_.n, "] of ", core::name(shape_.a.dtype),
                                    ", got none");
    }
    if (whole.bias > 0) backend_.axpby(1.0, options_.bias.expand(sum.shape), 1.0, sum);
    if (whole.activation != Activation::none)
      backend_.unary(unary_of(whole.activation), sum, sum, 0.0);
  }

  bool can_fuse(const GemmShape& shape) const {
    if (shape.a.dtype == DType::f64 || shape.activation == Activation::gelu) return false;
    View bias = options_.bias;
    if (shape.bias == 0) return true;
    const bool aligned = shape.bias >= 16;  // cuBLASLt's kernels may take it for granted
    const bool dense = bias.strides[0] == 1 || bias.shape[0] == 1;
    return bias.dtype == shape.y.dtype && dense && aligned;
  }

  void finish(View pre_activation) const {
    if (options_.activation == Activation::none) {
      backend_.copy(pre_activation, y_);
    } else {
      backend_.unary(unary_of(options_.activation), pre_activation, y_, 0.0);
    }
  }

  const CudaBackend& backend_;
  const Queue& queue_;
  const TensorView& y_;
  const MatmulOptions& options_;
  GemmShape shape_;
};

bool all_reshape(std::initializer_list<const TensorView*> views, const Shape& batch) {
  for (const TensorView* view : views) {
    if (!view->defined()) continue;
    Shape shape = batch;
    shape.push_back(view->size(-2)), shape.push_back(view->size(-1));
    if (!view->can_reshape(shape)) return false;
  }
  return true;
}

TensorView with_batch(View x, const Shape& batch) {
  if (!x.defined()) return x;
  Shape shape = batch;
  shape.push_back(x.size(-2)), shape.push_back(x.size(-1));
  return x.reshape(shape);
}

/// [batch..., M, K] to [batch M, K]: a batch that shares b is one taller product.
TensorView stacked(View x) {
  return x.defined() ? x.reshape({-1, x.size(-1)}) : x;
}

bool shares_b(View b) {
  for (int d = 0; d < b.dims() - 2; ++d) {
    if (b.shape[d] > 1 && b.strides[d] != 0) return false;
  }
  return b.dims() > 2;
}

bool can_stack(View x) {
  return !x.defined() || x.can_reshape({x.numel() / x.size(-1), x.size(-1)});
}

/// The batch dimension to loop over where all together are no single stride (attention over slices
/// of [B, T, 3 C] has two, B and the heads'): the shortest, so that the others make larger batches.
int shortest_batch_dimension(View y) {
  int shortest = 0;
  for (int d = 1; d < y.dims() - 2; ++d) {
    if (y.shape[d] < y.shape[shortest]) shortest = d;
  }
  return shortest;
}

void multiply_matrices(const CudaBackend& backend, const Queue& queue, View a, View b, View y,
                       const MatmulOptions& options) {
  const auto once = [&](View a_part, View b_part, View y_part, const MatmulOptions& of_part) {
    Product(backend, queue, a_part, b_part, y_part, of_part);
  };
  if (!multiply_padded(backend, queue, a, b, y, options, once)) once(a, b, y, options);
}

void multiply(const CudaBackend& backend, const Queue& queue, View a, View b, View y,
              const MatmulOptions& options) {
  MatmulOptions inner = options;
  if (shares_b(b) && can_stack(a) && can_stack(y) && can_stack(options.pre_activation)) {
    inner.pre_activation = stacked(options.pre_activation);
    TensorView one = b;
    while (one.dims() > 2) one = one.select(0, 0);
    multiply_matrices(backend, queue, stacked(a), one, stacked(y), inner);
    return;
  }
  if (y.dims() == 2) {
    multiply_matrices(backend, queue, a, b, y, inner);
    return;
  }
  const std::int64_t count = y.numel() / (y.size(-2) * y.size(-1));
  const Shape batch{count};
  if (y.dims() == 3 || all_reshape({&a, &b, &y, &options.pre_activation}, batch)) {
    inner.pre_activation = with_batch(options.pre_activation, batch);
    Product(backend, queue, with_batch(a, batch), with_batch(b, batch), with_batch(y, batch),
            inner);
    return;
  }
  const int d = shortest_batch_dimension(y);
  for (std::int64_t i = 0; i < y.shape[d]; ++i) {
    if (options.pre_activation.defined())
      inner.pre_activation = options.pre_activation.select(d, i);
    multiply(backend, queue, a.select(d, i), b.select(d, i), y.select(d, i), inner);
  }
}

}  // namespace

void CudaBackend::matmul(View a, View b, View y, const MatmulOptions& options) const {
  if (y.numel() == 0) return;
  const Queue queue("matmul", y.device);
  const bool columns_first = !row_major(y).has_value();
  if (columns_first && !options.bias.defined() && !options.pre_activation.defined() &&
      row_major(y.transpose(-1, -2))) {  // y^T = b^T a^T
    multiply(*this, queue, b.transpose(-1, -2), a.transpose(-1, -2), y.transpose(-1, -2), options);
    return;
  }
  multiply(*this, queue, a, b, y, options);
}

}  // namespace cairn::kernels
