// Normalisations. x, y, dy and dx share a floating dtype; weight and bias may be that or f32;
// statistics are f32 (f64 is taken too with f64 inputs).
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// y = (x - mean) * rstd * weight + bias over the last dimension. x [N, D] (leading dimensions
/// flattened by the caller), weight and bias [D] (may be undefined), mean and rstd [N] f32
/// (outputs). rstd = 1 / sqrt(var + eps), var biased.
void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias, double eps,
                const TensorView& y, const TensorView& mean, const TensorView& rstd);
/// dx, and dweight, dbias (+)= (each may be undefined).
void layer_norm_backward(const TensorView& x, const TensorView& weight, const TensorView& mean,
                         const TensorView& rstd, const TensorView& dy, const TensorView& dx,
                         const TensorView& dweight, const TensorView& dbias, bool accumulate);
/// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps).
void rms_norm(const TensorView& x, const TensorView& weight, double eps, const TensorView& y,
              const TensorView& rstd);
void rms_norm_backward(const TensorView& x, const TensorView& weight, const TensorView& rstd,
                       const TensorView& dy, const TensorView& dx, const TensorView& dweight,
                       bool accumulate);

/// Training batch norm over all but the channel dimension 1. x [N, C] or [N, C, H, W]
/// (channels-last is fast); weight, bias [C] f32 or x's dtype (may be undefined); mean, rstd [C]
/// f32 outputs; running_mean, running_var [C] (may be undefined): running = (1 - momentum) running
/// + momentum * batch value, with the unbiased variance. relu fuses a ReLU into y.
struct BatchNormOptions {
  double eps = 1e-5;
  double momentum = 0.1;
  bool relu = false;
};
void batch_norm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                const TensorView& running_mean, const TensorView& running_var, const TensorView& y,
                const TensorView& mean, const TensorView& rstd, const BatchNormOptions& options);
/// Evaluation: the running statistics normalise.
void batch_norm_eval(const TensorView& x, const TensorView& weight, const TensorView& bias,
                     const TensorView& running_mean, const TensorView& running_var,
                     const TensorView& y, const BatchNormOptions& options);
/// dx, and dweight, dbias (+)= (each may be undefined). With relu, y (the forward's output) masks
/// dy; otherwise y may be undefined. `batch_statistics` false: gradient of batch_norm_eval, where
/// mean and rstd are constants.
struct BatchNormBackwardOptions {
  bool relu = false;
  bool batch_statistics = true;
  bool accumulate = false;
};
void batch_norm_backward(const TensorView& x, const TensorView& y, const TensorView& weight,
                         const TensorView& mean, const TensorView& rstd, const TensorView& dy,
                         const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                         const BatchNormBackwardOptions& options);

}  // namespace cairn::kernels
