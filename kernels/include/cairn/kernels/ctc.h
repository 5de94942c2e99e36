// Connectionist temporal classification (Graves, Fernandez, Gomez & Schmidhuber 2006).
#pragma once

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// The labels of N sequences: targets [N, S] i64, of which the first target_lengths[n] count; blank
/// is a class of its own. input_lengths and target_lengths [N] i64.
struct CtcTargets {
  TensorView targets, input_lengths, target_lengths;
  std::int64_t blank = 0;
};

/// loss[n] = -log of the sum of the probabilities of all paths through the first input_lengths[n]
/// steps that read as the target once repetitions and then blanks are left out; infinite where
/// there is none. log_probs [T, N, C], f32 or f64, and contiguous as all views here; loss [N];
/// alpha [N, T, 2 S + 1], for the backward. Lengths or classes out of range throw (CPU; on CUDA the
/// sequence's loss is NaN).
void ctc_loss(const TensorView& log_probs, const CtcTargets& targets, const TensorView& loss,
              const TensorView& alpha);
/// dlog_probs[t, n, c] = -dloss[n] times the probability that a path is in c at step t, and 0 where
/// dloss is.
void ctc_loss_backward(const TensorView& log_probs, const CtcTargets& targets,
                       const TensorView& loss, const TensorView& alpha, const TensorView& dloss,
                       const TensorView& dlog_probs);

}  // namespace cairn::kernels
