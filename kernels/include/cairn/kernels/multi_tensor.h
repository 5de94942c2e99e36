// The two passes of an optimizer step over many tensors at once: check + norm, then unscale + clip
// + update + half write.
//
// The lists are pointer tables: slices of a gradient arena and tensors of a foreign trainer look
// the same. All tensors are dense (their elements are visited in memory order; weight, master,
// moments and gradient of an entry share one layout), all on one device. One launch on CUDA for the
// whole list.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// What the check pass found. Norms are of the gradients as they lie (scaled); non-finite elements
/// are left out of them.
struct GradientCheck {
  double squared_norm = 0.0;          // of all tensors together
  std::vector<double> squared_norms;  // per tensor, if asked
  std::int64_t first_nonfinite =
      -1;               // index of the first tensor in the list with an inf or NaN; -1: none
  bool is_nan = false;  // in that tensor: NaN (true) or only inf (false)
  std::int64_t nonfinite_count = 0;  // elements in that tensor
};
/// One pass over the gradients, one read by the host. f16, bf16, f32 in any mix. Fixed order: the
/// same bits in every run.
GradientCheck check_gradients(const std::vector<TensorView>& gradients,
                              bool per_tensor_norms = false);

/// One parameter in an update. Undefined views are absent.
struct UpdateEntry {
  TensorView gradient;  // f16, bf16 or f32; read, never written
  TensorView weight;    // f16, bf16 or f32; written
  TensorView
      master;  // f32; the true weight of a half parameter. Absent: the weight is the truth (and for half weights, rounded each step)
  TensorView moment1;  // f32: exp_avg, or SGD's momentum buffer
  TensorView moment2;  // f32: exp_avg_sq
};

/// Adam, per element, with g = gradient * gradient_scale:
///   adamw false: g += weight_decay w.  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
///   w -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) [+ weight_decay w if adamw])
/// Kingma & Ba 2015; Loshchilov & Hutter 2019. The weight is then rounded once from the master.
struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool adamw = true;
  double correction1 = 1.0, correction2 = 1.0;  // 1 - beta^step, or 1 without bias correction
  double gradient_scale =
      1.0;  // 1 / loss scale * clip coefficient / count: whatever multiplies the gradient
};
void adam_update(const std::vector<UpdateEntry>& entries, const AdamOptions& options);

/// SGD as in apex.optimizers.FusedSGD: g = gradient * gradient_scale; [g += wd w]; buf = first ? g
/// : momentum buf + (1 - dampening) g; g = nesterov ? g + momentum buf : buf; [g += wd w if
/// wd_after_momentum]; w -= lr g. moment1 is buf; absent where momentum is 0.
struct SgdOptions {
  double lr = 1e-3, momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false, wd_after_momentum = false;
  bool first_step = false;
  double gradient_scale = 1.0;
};
void sgd_update(const std::vector<UpdateEntry>& entries, const SgdOptions& options);

}  // namespace cairn::kernels
