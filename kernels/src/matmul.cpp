#include "cairn/kernels/matmul.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

constexpr const char* kOp = "matmul";

Shape leading(const Shape& shape) {
  return Shape(shape.begin(), shape.end() - 2);
}

Shape with_matrix(Shape batch, std::int64_t rows, std::int64_t columns) {
  batch.push_back(rows);
  batch.push_back(columns);
  return batch;
}

void check_operands(const TensorView& a, const TensorView& b, const TensorView& y) {
  check_device(kOp, {{"a", a}, {"b", b}, {"y", y}});
  check_floating(kOp, {{"a", a}});
  check_same_dtype(kOp, {{"a", a}, {"b", b}});
  CAIRN_CHECK(y.dtype == a.dtype || (y.dtype == DType::f32 && core::is_half(a.dtype)), kOp,
              "expected y of dtype ", core::name(a.dtype), " like a, or f32 with half a, got ",
              core::name(y.dtype));
  for (int i = 0; i < y.dims(); ++i) {
    CAIRN_CHECK(y.shape[i] <= 1 || y.strides[i] != 0, kOp,
                "expected y without repeated dimensions, got strides ", y.strides);
  }
  CAIRN_CHECK(a.dims() >= 2 && b.dims() >= 2, kOp,
              "expected a [..., M, K] and b [..., K, N], got shapes ", a.shape, " and ", b.shape,
              " (unsqueeze a vector)");
  CAIRN_CHECK(a.size(-1) == b.size(-2), kOp, "expected as many columns in a as rows in b, got ",
              a.shape, " and ", b.shape);
}

void check_options(const TensorView& a, const TensorView& y, const MatmulOptions& options) {
  if (options.bias.defined()) {
    check_device(kOp, {{"y", y}, {"bias", options.bias}});
    check_shape(kOp, {"bias", options.bias}, {y.size(-1)});
    const DType dtype = options.bias.dtype;
    CAIRN_CHECK(dtype == a.dtype || (dtype == DType::f32 && core::is_half(a.dtype)), kOp,
                "expected bias of dtype ", core::name(a.dtype), " or f32, got ", core::name(dtype));
  }
  if (options.pre_activation.defined()) {
    check_device(kOp, {{"y", y}, {"pre_activation", options.pre_activation}});
    check_shape(kOp, {"pre_activation", options.pre_activation}, y.shape);
    check_dtype(kOp, {"pre_activation", options.pre_activation}, y.dtype);
  }
  CAIRN_CHECK(!options.accumulate || !options.bias.defined(), kOp,
              "expected no bias with accumulate, got one");
  CAIRN_CHECK(!options.accumulate || options.activation == Activation::none, kOp,
              "expected no activation with accumulate, got one");
}

// K = 0: nothing to add up.
void finish_empty_sum(const Backend& backend, const TensorView& y, const MatmulOptions& options) {
  if (options.accumulate) return;
  const TensorView& sum = options.pre_activation.defined() ? options.pre_activation : y;
  if (options.bias.defined()) {
    backend.copy(options.bias.expand(y.shape), sum);
  } else {
    backend.fill(sum, 0.0);
  }
  if (options.activation != Activation::none) {
    backend.unary(unary_of(options.activation), sum, y, 0.0);
  } else if (options.pre_activation.defined()) {
    backend.copy(sum, y);
  }
}

}  // namespace

void matmul(const TensorView& a, const TensorView& b, const TensorView& y,
            const MatmulOptions& options) {
  check_operands(a, b, y);
  const Shape batch = core::broadcast_shapes(leading(a.shape), leading(b.shape), kOp);
  check_shape(kOp, {"y", y}, with_matrix(batch, a.size(-2), b.size(-1)));
  check_options(a, y, options);
  if (y.numel() == 0) return;
  wrote(y, options.pre_activation);
  if (a.size(-1) == 0) {
    launch(y.device, [=](const Backend& backend) { finish_empty_sum(backend, y, options); });
    return;
  }
  const TensorView all_a = a.expand(with_matrix(batch, a.size(-2), a.size(-1)));
  const TensorView all_b = b.expand(with_matrix(batch, b.size(-2), b.size(-1)));
  launch(y.device, [=](const Backend& backend) { backend.matmul(all_a, all_b, y, options); });
}

}  // namespace cairn::kernels
