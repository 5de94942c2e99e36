#include "cairn/kernels/layer_norm.h"
#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

void check_optional(const char* op, const Named& v, const TensorView& x) {
  if (!v.view.defined()) return;
  check_device(op, {{"x", x}, v});
  check_floating(op, {v});
  check_shape(op, v, {x.shape[1]});
}

void check_statistic(const char* op, const Named& v, const TensorView& x) {
  check_device(op, {{"x", x}, v});
  check_shape(op, v, {x.shape[0]});
  const bool fits =
      v.view.dtype == DType::f32 || (v.view.dtype == DType::f64 && x.dtype == DType::f64);
  CAIRN_CHECK(fits, op, "expected ", v.name, " of dtype f32",
              x.dtype == DType::f64 ? " or f64" : "", ", got ", core::name(v.view.dtype));
}

void check_like_x(const char* op, const TensorView& x, std::initializer_list<Named> views) {
  check_defined(op, {{"x", x}});
  check_floating(op, {{"x", x}});
  check_dims(op, {"x", x}, 2);
  for (const Named& v : views) {
    check_device(op, {{"x", x}, v});
    check_same_dtype(op, {{"x", x}, v});
    check_same_shape(op, {{"x", x}, v});
  }
}

}  // namespace

void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias, double eps,
                const TensorView& y, const TensorView& mean, const TensorView& rstd) {
  check_like_x("layer_norm", x, {{"y", y}});
  check_optional("layer_norm", {"weight", weight}, x);
  check_optional("layer_norm", {"bias", bias}, x);
  check_statistic("layer_norm", {"mean", mean}, x);
  check_statistic("layer_norm", {"rstd", rstd}, x);
  wrote(y, mean, rstd);
  launch(x.device,
         [=](const Backend& backend) { backend.layer_norm(x, weight, bias, eps, y, mean, rstd); });
}

void layer_norm_backward(const TensorView& x, const TensorView& weight, const TensorView& mean,
                         const TensorView& rstd, const TensorView& dy, const TensorView& dx,
                         const TensorView& dweight, const TensorView& dbias, bool accumulate) {
  const char* op = "layer_norm_backward";
  check_like_x(op, x, {{"dy", dy}});
  if (dx.defined()) check_like_x(op, x, {{"dx", dx}});
  check_optional(op, {"weight", weight}, x);
  check_statistic(op, {"mean", mean}, x);
  check_statistic(op, {"rstd", rstd}, x);
  check_optional(op, {"dweight", dweight}, x);
  check_optional(op, {"dbias", dbias}, x);
  wrote(dx, dweight, dbias);
  launch(x.device, [=](const Backend& backend) {
    backend.layer_norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate);
  });
}

void rms_norm(const TensorView& x, const TensorView& weight, double eps, const TensorView& y,
              const TensorView& rstd) {
  check_like_x("rms_norm", x, {{"y", y}});
  check_optional("rms_norm", {"weight", weight}, x);
  check_statistic("rms_norm", {"rstd", rstd}, x);
  wrote(y, rstd);
  launch(x.device, [=](const Backend& backend) { backend.rms_norm(x, weight, eps, y, rstd); });
}

void rms_norm_backward(const TensorView& x, const TensorView& weight, const TensorView& rstd,
                       const TensorView& dy, const TensorView& dx, const TensorView& dweight,
                       bool accumulate) {
  const char* op = "rms_norm_backward";
  check_like_x(op, x, {{"dy", dy}});
  if (dx.defined()) check_like_x(op, x, {{"dx", dx}});
  check_optional(op, {"weight", weight}, x);
  check_statistic(op, {"rstd", rstd}, x);
  check_optional(op, {"dweight", dweight}, x);
  wrote(dx, dweight);
  launch(x.device, [=](const Backend& backend) {
    backend.rms_norm_backward(x, weight, rstd, dy, dx, dweight, accumulate);
  });
}

}  // namespace cairn::kernels
