// Attention as products and a softmax, with the T x S weights in workspace memory: for dtypes and
// head sizes that a backend's own kernel does not take.
#pragma once

#include "backend.h"

namespace cairn::kernels {

void composed_attention(const Backend& backend, const TensorView& q, const TensorView& k,
                        const TensorView& v, const TensorView& y, const TensorView& lse,
                        const AttentionOptions& options);
void composed_attention_backward(const Backend& backend, const TensorView& q, const TensorView& k,
                                 const TensorView& v, const TensorView& dy, const TensorView& dq,
                                 const TensorView& dk, const TensorView& dv,
                                 const AttentionOptions& options);

}  // namespace cairn::kernels
