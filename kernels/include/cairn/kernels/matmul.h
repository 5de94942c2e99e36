// Matrix products: oneDNN on the CPU, cuBLASLt on CUDA.
//
// f16 on the CPU is computed through f32 (widened, multiplied, rounded once), bf16 on oneDNN's bf16
// kernels where the processor has them.
#pragma once

#include "cairn/core/tensor_view.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::kernels {

struct MatmulOptions {
  double alpha = 1.0;
  bool accumulate = false;  // y += instead of y =
  /// [N], added to every row before the activation; undefined: none. Not with accumulate.
  TensorView bias;
  Activation activation = Activation::none;
  /// [..., M, N] of y's dtype: receives the value before the activation, which its backward needs;
  /// undefined: not kept.
  TensorView pre_activation;
};

/// y[..., M, N] = alpha * a[..., M, K] b[..., K, N]. Leading (batch) dimensions equal, or 1/absent
/// in b or a. Transposes are strides: pass view.transpose(-1, -2), it is never copied. a and b
/// share a floating dtype; y has it, or f32 (half inputs, f32 gradient slots). K = 0 gives zeros
/// (plus bias).
void matmul(const TensorView& a, const TensorView& b, const TensorView& y,
            const MatmulOptions& options = {});

}  // namespace cairn::kernels
