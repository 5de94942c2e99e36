#include "cairn/kernels/elementwise.h"

#include "cairn/core/tensor.h"
#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

constexpr bool is_comparison(BinaryOp op) {
  return op >= BinaryOp::eq;
}

/// A dense tensor of y's layout (row-major where y is not dense) on another device.
Tensor staging_like(const TensorView& y, DType dtype, Device device) {
  const Strides strides = y.is_dense() ? y.strides : core::contiguous_strides(y.shape);
  return Tensor::empty_strided(y.shape, strides, dtype, device);
}

/// Keeps a tensor alive until what is queued on its device's current stream is done.
void keep_until_done(const Tensor& tensor) {
  const Device device = tensor.device();
  if (device.is_cpu() && !core::Stream::current(device).is_inline()) {
    core::Stream::current(device).submit([tensor] {});
  }
}

/// Between two CPU devices: after what is queued on either's stream, before what comes later on
/// either.
void copy_between_cpus(const TensorView& x, const TensorView& y) {
  const core::Stream from = core::Stream::current(x.device), to = core::Stream::current(y.device);
  core::Event ready(x.device), done(y.device);
  ready.record(from);
  to.wait(ready);
  launch(y.device, [=](const Backend& backend) { backend.copy(x, y); });
  done.record(to);
  from.wait(done);
}

/// The conversion runs where x lies, the bytes travel once, in y's dtype and layout.
void copy_across(const TensorView& x, const TensorView& y) {
  const bool ready = x.dtype == y.dtype && x.strides == y.strides && x.is_dense();
  Tensor sent;
  if (!ready) {
    sent = staging_like(y, y.dtype, x.device);
    copy(x, sent);
  }
  const TensorView source = ready ? x : sent.view();
  if (y.is_dense()) {
    core::copy_bytes(source, y);
  } else {
    const Tensor received = staging_like(y, y.dtype, y.device);
    core::copy_bytes(source, received);
    copy(received, y);
    keep_until_done(received);
  }
  if (sent) keep_until_done(sent);
}

}  // namespace

void fill(const TensorView& y, double value) {
  check_defined("fill", {{"y", y}});
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.fill(y, value); });
}

void copy(const TensorView& x, const TensorView& y) {
  check_defined("copy", {{"x", x}, {"y", y}});
  const TensorView from = broadcast_to("copy", {"x", x}, y.shape);
  wrote(y);
  if (x.device == y.device) {
    launch(y.device, [=](const Backend& backend) { backend.copy(from, y); });
  } else if (x.device.is_cpu() && y.device.is_cpu()) {
    copy_between_cpus(from, y);
  } else {
    copy_across(from, y);
  }
}

void binary(BinaryOp op, const TensorView& a, const TensorView& b, const TensorView& y) {
  check_device("binary", {{"y", y}, {"a", a}, {"b", b}});
  check_same_dtype("binary", {{"a", a}, {"b", b}});
  if (!is_comparison(op) || y.dtype != DType::boolean) {
    check_same_dtype("binary", {{"a", a}, {"y", y}});
  }
  const bool fraction = op == BinaryOp::div || op == BinaryOp::pow || op == BinaryOp::atan2;
  if (fraction) check_floating("binary", {{"a", a}});
  const TensorView wide_a = broadcast_to("binary", {"a", a}, y.shape);
  const TensorView wide_b = broadcast_to("binary", {"b", b}, y.shape);
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.binary(op, wide_a, wide_b, y); });
}

void unary(UnaryOp op, const TensorView& x, const TensorView& y, double slope) {
  check_device("unary", {{"x", x}, {"y", y}});
  check_floating("unary", {{"x", x}});
  check_same_dtype("unary", {{"x", x}, {"y", y}});
  check_same_shape("unary", {{"x", x}, {"y", y}});
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.unary(op, x, y, slope); });
}

void unary_backward(UnaryOp op, const TensorView& saved, const TensorView& dy, const TensorView& dx,
                    double slope) {
  check_device("unary_backward", {{"saved", saved}, {"dy", dy}, {"dx", dx}});
  check_floating("unary_backward", {{"saved", saved}});
  check_same_dtype("unary_backward", {{"saved", saved}, {"dy", dy}, {"dx", dx}});
  check_same_shape("unary_backward", {{"saved", saved}, {"dx", dx}});
  const TensorView wide_dy = broadcast_to("unary_backward", {"dy", dy}, dx.shape);
  wrote(dx);
  launch(dx.device,
         [=](const Backend& backend) { backend.unary_backward(op, saved, wide_dy, dx, slope); });
}

void affine(const TensorView& x, double scale, double shift, const TensorView& y) {
  check_device("affine", {{"x", x}, {"y", y}});
  check_floating("affine", {{"x", x}, {"y", y}});
  const TensorView wide = broadcast_to("affine", {"x", x}, y.shape);
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.affine(wide, scale, shift, y); });
}

void pow_scalar(const TensorView& x, double exponent, const TensorView& y) {
  check_device("pow_scalar", {{"x", x}, {"y", y}});
  check_floating("pow_scalar", {{"x", x}});
  check_same_dtype("pow_scalar", {{"x", x}, {"y", y}});
  check_same_shape("pow_scalar", {{"x", x}, {"y", y}});
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.pow_scalar(x, exponent, y); });
}

void axpby(double a, const TensorView& x, double b, const TensorView& y) {
  check_device("axpby", {{"x", x}, {"y", y}});
  check_floating("axpby", {{"x", x}, {"y", y}});
  const TensorView wide = broadcast_to("axpby", {"x", x}, y.shape);
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.axpby(a, wide, b, y); });
}

void dropout(const TensorView& x, double p, std::uint64_t seed, std::uint64_t offset,
             const TensorView& y) {
  check_device("dropout", {{"x", x}, {"y", y}});
  check_floating("dropout", {{"x", x}});
  check_same_dtype("dropout", {{"x", x}, {"y", y}});
  const TensorView wide = broadcast_to("dropout", {"x", x}, y.shape);
  CAIRN_CHECK(p >= 0.0 && p <= 1.0, "dropout", "expected p in [0, 1], got ", p);
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.dropout(wide, p, seed, offset, y); });
}

void reduce(ReduceOp op, const TensorView& x, const TensorView& y, bool accumulate) {
  check_device("reduce", {{"x", x}, {"y", y}});
  check_dims("reduce", {"y", y}, x.dims());
  for (int d = 0; d < x.dims(); ++d) {
    CAIRN_CHECK(y.shape[d] == x.shape[d] || y.shape[d] == 1, "reduce", "expected y of x's shape ",
                x.shape, " with 1 in the reduced dimensions, got ", y.shape);
  }
  const bool over_nothing = x.numel() == 0 && y.numel() > 0;
  CAIRN_CHECK(op != ReduceOp::max || !over_nothing, "reduce",
              "expected elements to take the maximum of, got x of shape ", x.shape);
  CAIRN_CHECK(op != ReduceOp::max || !accumulate, "reduce",
              "expected accumulate with sum or mean, got it with max");
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.reduce(op, x, y, accumulate); });
}

}  // namespace cairn::kernels
