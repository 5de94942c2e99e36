// Losses. Per-element losses (and lse) are f32, with f64 inputs f64 is taken too; reductions (sum,
// mean) are the caller's: see nn/losses.
#pragma once

#include <optional>

#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
};
/// Of which classes logits are that lack some: the first, and how many there are in all.
struct ClassSlice {
  std::int64_t first = 0, all = 0;
};
/// loss[i] = (1 - s) * -log p(target) + s * mean over classes of -log p. logits [N, V] floating,
/// target [N] i64, loss [N] f32 (0 where ignored), lse [N] f32: log sum exp of each row, for the
/// backward. One pass over the logits. A target outside 0..V-1 (and not ignored) throws
/// InvalidArgument naming row and value (CPU; on CUDA the row's loss is NaN).
void cross_entropy(const TensorView& logits, const TensorView& target, const TensorView& loss,
                   const TensorView& lse, const CrossEntropyOptions& options);
/// dlogits [N, V] = dloss[i] * (p - q); ignored rows 0. dloss [N] f32 (may be repeated with stride
/// 0). dlogits may be logits. With a slice, both are those of V of its classes, and lse is of all.
void cross_entropy_backward(const TensorView& logits, const TensorView& target,
                            const TensorView& lse, const TensorView& dloss,
                            const TensorView& dlogits, const CrossEntropyOptions& options,
                            std::optional<ClassSlice> slice = {});

/// loss = (x - target)^2, element by element; x and target one dtype, loss f32.
void mse(const TensorView& x, const TensorView& target, const TensorView& loss);
void mse_backward(const TensorView& x, const TensorView& target, const TensorView& dloss,
                  const TensorView& dx);
/// loss = max(x, 0) - x t + log(1 + exp(-|x|)), the stable form; loss f32.
void bce_with_logits(const TensorView& x, const TensorView& target, const TensorView& loss);
void bce_with_logits_backward(const TensorView& x, const TensorView& target,
                              const TensorView& dloss, const TensorView& dx);
/// The same of probabilities p in [0, 1]: loss = -t log p - (1 - t) log(1 - p), each logarithm at
/// least -100 and the gradient's denominator p (1 - p) at least 1e-12, as PyTorch's. NaN outside
/// of [0, 1]. loss f32.
void bce(const TensorView& p, const TensorView& target, const TensorView& loss);
void bce_backward(const TensorView& p, const TensorView& target, const TensorView& dloss,
                  const TensorView& dp);

}  // namespace cairn::kernels
