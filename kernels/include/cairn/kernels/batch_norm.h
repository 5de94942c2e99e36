// Batch norm. x, y, dy and dx share a floating dtype; weight and bias may be that or f32;
// statistics are f32 (f64 is taken too with f64 inputs).
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// Training batch norm over all but the channel dimension 1. x [N, C] or [N, C, H, W]
/// (channels-last is fast); weight, bias [C] f32 or x's dtype (may be undefined); mean, rstd [C]
/// f32 outputs; running_mean, running_var [C] (may be undefined): running = (1 - momentum) running
/// + momentum * batch value, with the unbiased variance. relu fuses a ReLU into y.
struct BatchNormOptions {
  bool training = true;  // autograd chooses by it; the backward's statistics are then the batch's
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
/// dy; otherwise y may be undefined. `training` false: gradient of batch_norm_eval, where mean and
/// rstd are constants.
void batch_norm_backward(const TensorView& x, const TensorView& y, const TensorView& weight,
                         const TensorView& mean, const TensorView& rstd, const TensorView& dy,
                         const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                         const BatchNormOptions& options, bool accumulate = false);

}  // namespace cairn::kernels
