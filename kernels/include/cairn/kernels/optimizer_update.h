// The update passes of an optimizer over many tensors at once: unscale + clip + update + half write,
// one pass over each parameter.
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
