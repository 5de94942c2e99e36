// Passes over many tensors at once: what an optimizer must know of its gradients before a step.
//
// The lists are pointer tables: slices of a gradient arena and tensors of a foreign trainer look
// the same. All tensors are dense (their elements are visited in memory order), all on one device.
// One launch on CUDA for the whole list. The update passes are in optimizer_update.h.
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

}  // namespace cairn::kernels
