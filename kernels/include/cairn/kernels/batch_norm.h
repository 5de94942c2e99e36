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
/// dx, and dweight, dbias (+)= (each of the three may be undefined). With relu, y (the forward's
/// output) masks dy; otherwise y may be undefined. `training` false: gradient of batch_norm_eval,
/// where mean and rstd are constants.
void batch_norm_backward(const TensorView& x, const TensorView& y, const TensorView& weight,
                         const TensorView& mean, const TensorView& rstd, const TensorView& dy,
                         const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                         const BatchNormOptions& options, bool accumulate = false);

// The stages of a batch norm whose batch lies on several ranks (parallel::SyncBatchNorm). Forward:
// the moments of each part, merged; batch_norm_eval then normalises with the merged mean and
// variance. Backward: batch_norm_backward without dx gives a part's sums; their means over the
// whole batch make dx.

/// part [2 C + 1] f32 = each channel's mean, each channel's sum of squared deviations from it, and
/// the number of values per channel (0 for an empty x, as are the others).
void batch_norm_moments(const TensorView& x, const TensorView& part);
/// parts [R, 2 C + 1] joined in order and in double (Chan, Golub & LeVeque 1979): mean, var
/// (biased) and rstd [C], count [1], all f32. running_mean and running_var [C] of any floating
/// dtype (may be undefined) are updated as batch_norm does, by the values of all parts; not where
/// there are none.
void batch_norm_merge(const TensorView& parts, const TensorView& running_mean,
                      const TensorView& running_var, const TensorView& mean, const TensorView& var,
                      const TensorView& rstd, const TensorView& count,
                      const BatchNormOptions& options);
/// dx = weight rstd (g - mean_g - xhat mean_gx), where xhat = (x - mean) rstd, g is dy (with relu:
/// where y > 0), and mean_g and mean_gx [C] f32 are the means of g and g xhat over the whole batch.
void batch_norm_backward_data(const TensorView& x, const TensorView& y, const TensorView& weight,
                              const TensorView& mean, const TensorView& rstd, const TensorView& dy,
                              const TensorView& mean_g, const TensorView& mean_gx,
                              const TensorView& dx, const BatchNormOptions& options);

}  // namespace cairn::kernels
