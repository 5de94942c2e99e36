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
  if (dx.defined()) check_like(op, {"x", x}, {"dx", dx});
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

void batch_norm_moments(const TensorView& x, const TensorView& part) {
  constexpr const char* op = "batch_norm_moments";
  check_image(op, {"x", x});
  check_device(op, {{"x", x}, {"part", part}});
  check_shape(op, {"part", part}, {2 * x.size(1) + 1});
  check_dtype(op, {"part", part}, DType::f32);
  wrote(part);
  launch(x.device, [=](const Backend& backend) {
    if (x.numel() > 0) {
      backend.batch_norm_moments(x, part);
    } else {
      backend.fill(part, 0.0);
    }
  });
}

void batch_norm_merge(const TensorView& parts, const TensorView& running_mean,
                      const TensorView& running_var, const TensorView& mean, const TensorView& var,
                      const TensorView& rstd, const TensorView& count,
                      const BatchNormOptions& options) {
  constexpr const char* op = "batch_norm_merge";
  check_defined(op, {{"parts", parts}, {"mean", mean}});
  check_dtype(op, {"parts", parts}, DType::f32);
  const std::int64_t channels = mean.numel();
  CAIRN_CHECK(parts.dims() == 2 && parts.size(1) == 2 * channels + 1 && parts.is_contiguous(), op,
              "expected contiguous parts [R, ", 2 * channels + 1, "], got shape ", parts.shape);
  for (const Named& v : {Named{"mean", mean}, Named{"var", var}, Named{"rstd", rstd}}) {
    check_device(op, {{"parts", parts}, v});
    check_shape(op, v, {channels});
    check_dtype(op, v, DType::f32);
  }
  for (const Named& v : {Named{"running_mean", running_mean}, Named{"running_var", running_var}}) {
    if (!v.view.defined()) continue;
    check_device(op, {{"parts", parts}, v});
    check_floating(op, {v});
    check_shape(op, v, {channels});
  }
  check_device(op, {{"parts", parts}, {"count", count}});
  check_shape(op, {"count", count}, {1});
  check_dtype(op, {"count", count}, DType::f32);
  wrote(running_mean, running_var, mean, var, rstd, count);
  launch(parts.device, [=](const Backend& backend) {
    backend.batch_norm_merge(parts, running_mean, running_var, mean, var, rstd, count, options);
  });
}

void batch_norm_backward_data(const TensorView& x, const TensorView& y, const TensorView& weight,
                              const TensorView& mean, const TensorView& rstd, const TensorView& dy,
                              const TensorView& mean_g, const TensorView& mean_gx,
                              const TensorView& dx, const BatchNormOptions& options) {
  constexpr const char* op = "batch_norm_backward_data";
  check_image(op, {"x", x});
  if (options.relu) check_like(op, {"x", x}, {"y", y});
  check_like(op, {"x", x}, {"dy", dy});
  check_like(op, {"x", x}, {"dx", dx});
  check_channels_if_defined(op, {"x", x}, {"weight", weight});
  check_statistic(op, {"x", x}, {"mean", mean});
  check_statistic(op, {"x", x}, {"rstd", rstd});
  check_statistic(op, {"x", x}, {"mean_g", mean_g});
  check_statistic(op, {"x", x}, {"mean_gx", mean_gx});
  if (x.numel() == 0) return;
  wrote(dx);
  launch(x.device, [=](const Backend& backend) {
    backend.batch_norm_backward_data(x, y, weight, mean, rstd, dy, mean_g, mean_gx, dx, options);
  });
}

}  // namespace cairn::kernels
