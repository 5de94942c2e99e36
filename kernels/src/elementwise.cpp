#include "cairn/kernels/elementwise.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

void binary(BinaryOp op, const TensorView& a, const TensorView& b, const TensorView& y) {
  check_device("binary", {{"y", y}, {"a", a}, {"b", b}});
  check_same_dtype("binary", {{"a", a}, {"b", b}});
  if (!is_comparison(op) || y.dtype != DType::boolean) {
    check_same_dtype("binary", {{"a", a}, {"y", y}});
  }
  const bool fraction = op == BinaryOp::div || op == BinaryOp::pow || op == BinaryOp::atan2 ||
                        op == BinaryOp::add_relu || op == BinaryOp::mask;
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

}  // namespace cairn::kernels
