// Layer norm and RMS norm. x, y, dy and dx share a floating dtype; weight and bias may be that or
// f32; statistics are f32 (f64 is taken too with f64 inputs).
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

}  // namespace cairn::kernels
