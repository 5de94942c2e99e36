#include <cmath>

#include "cairn/kernels/batch_norm.h"
#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

void check_image(const char* op, const Named& x) {
  check_defined(op, {x});
  check_floating(op, {x});
  CAIRN_CHECK(x.view.dims() == 2 || x.view.dims() == 4, op, "expected ", x.name,
              " [N, C] or [N, C, H, W], got shape ", x.view.shape);
}

// Like x in device, dtype and shape.
void check_like(const char* op, const Named& x, const Named& v) {
  check_device(op, {x, v});
  check_same_dtype(op, {x, v});
  check_same_shape(op, {x, v});
}

// [C], of x's dtype or f32.
void check_channels(const char* op, const Named& x, const Named& v) {
  check_device(op, {x, v});
  check_shape(op, v, {x.view.size(1)});
  CAIRN_CHECK(v.view.dtype == DType::f32 || v.view.dtype == x.view.dtype, op, "expected ", v.name,
              " of dtype f32 or ", core::name(x.view.dtype), " like ", x.name, ", got ",
              core::name(v.view.dtype));
}

void check_channels_if_defined(const char* op, const Named& x, const Named& v) {
  if (v.view.defined()) check_channels(op, x, v);
}

void check_statistic(const char* op, const Named& x, const Named& v) {
  check_channels(op, x, v);
  check_dtype(op, v, DType::f32);
}

std::int64_t values_per_channel(const TensorView& x) {
  return x.dims() == 2 ? x.size(0) : x.size(0) * x.size(2) * x.size(3);
}

}  // namespace

void batch_norm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                const TensorView& running_mean, const TensorView& running_var, const TensorView& y,
                const TensorView& mean, const TensorView& rstd, const BatchNormOptions& options) {
  constexpr const char* op = "batch_norm";
  check_image(op, {"x", x});
  check_like(op, {"x", x}, {"y", y});
  check_channels_if_defined(op, {"x", x}, {"weight", weight});
  check_channels_if_defined(op, {"x", x}, {"bias", bias});
  check_channels_if_defined(op, {"x", x}, {"running_mean", running_mean});
  check_channels_if_defined(op, {"x", x}, {"running_var", running_var});
  check_statistic(op, {"x", x}, {"mean", mean});
  check_statistic(op, {"x", x}, {"rstd", rstd});
  CAIRN_CHECK(values_per_channel(x) != 1 || x.size(1) == 0, op,
              "expected more than one value per channel to train on, got x ", x.shape,
              " (a larger batch, or evaluation mode)");
  wrote(y, mean, rstd, running_mean, running_var);
  launch(x.device, [=](const Backend& backend) {
    if (x.numel() > 0) {
      backend.batch_norm(x, weight, bias, running_mean, running_var, y, mean, rstd, options);
      return;
    }
    backend.fill(mean, 0.0);
    backend.fill(rstd, 1.0 / std::sqrt(options.eps));
  });
}

void batch_norm_eval(const TensorView& x, const TensorView& weight, const TensorView& bias,
                     const TensorView& running_mean, const TensorView& running_var,
                     const TensorView& y, const BatchNormOptions& options) {
  constexpr const char* op = "batch_norm_eval";
  check_image(op, {"x", x});
  check_like(op, {"x", x}, {"y", y});
  check_channels_if_defined(op, {"x", x}, {"weight", weight});
  check_channels_if_defined(op, {"x", x}, {"bias", bias});
  check_channels(op, {"x", x}, {"running_mean", running_mean});
  check_channels(op, {"x", x}, {"running_var", running_var});
  if (x.numel() == 0) return;
  wrote(y);
  launch(x.device, [=](const Backend& backend) {
    backend.batch_norm_eval(x, weight, bias, running_mean, running_var, y, options);
  });
}

void batch_norm_backward(const TensorView& x, const TensorView& y, const TensorView& weight,
                         const TensorView& mean, const TensorView& rstd, const TensorView& dy,
                         const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                         const BatchNormOptions& options, bool accumulate) {
  constexpr const char* op = "batch_norm_backward";
  check_image(op, {"x", x});
  if (options.relu) check_like(op, {"x", x}, {"y", y});
  check_like(op, {"x", x}, {"dy", dy});
  check_like(op, {"x", x}, {"dx", dx});
  check_channels_if_defined(op, {"x", x}, {"weight", weight});
  check_channels_if_defined(op, {"x", x}, {"dweight", dweight});
  check_channels_if_defined(op, {"x", x}, {"dbias", dbias});
  check_statistic(op, {"x", x}, {"mean", mean});
  check_statistic(op, {"x", x}, {"rstd", rstd});
  wrote(dx, dweight, dbias);
  launch(x.device, [=](const Backend& backend) {
    if (x.numel() > 0) {
      backend.batch_norm_backward(x, y, weight, mean, rstd, dy, dx, dweight, dbias, options,
                                  accumulate);
      return;
    }
    if (accumulate) return;
    if (dweight.defined()) backend.fill(dweight, 0.0);
    if (dbias.defined()) backend.fill(dbias, 0.0);
  });
}

}  // namespace cairn::kernels
