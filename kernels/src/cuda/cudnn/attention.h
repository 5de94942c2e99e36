// Attention by the fused kernels of cuDNN (attention_graph.h), where it has some that give what
// kernels/attention.h promises. It is not asked
//
//   - for f32 and f64, heads of more than 256 columns (backward, but on sm_90: 128), GPUs before
//     sm_80, versions before 9.16;
//   - for dropout, whose bits are cuDNN's own, and lengths of samples;
//   - where a causal mask leaves queries without keys: its documents refuse that, it does not;
//   - for scales that are not positive: engines take the maximum before they scale;
//   - for a backward on sm_100 and sm_110, where the graph's form does not make it deterministic,
//     and where the scores of one sample take more than 256 MiB in half;
//   - for ever new lengths without a causal mask, or of queries and keys that differ
//     (attention_lengths.h).
#pragma once

#include <optional>

#include "cairn/kernels/attention.h"
#include "cuda/queue.h"

namespace cairn::kernels::cuda {

/// Operands of one half dtype whose columns are neighbours, a multiple of 8 of them, with rows that
/// start at multiples of 16 bytes. The backward's are undefined in a forward.
struct SdpaOperands {
  TensorView q, k, v, y, lse, dy = {}, dq = {}, dk = {}, dv = {};
};

/// Whether cuDNN may be asked; no promise that it has a plan.
bool sdpa_may_ask(const Queue& queue, const TensorView& q, const TensorView& k,
                  const AttentionOptions& options, bool backward);

/// The same, and for which lengths (attention_lengths.h): rows of zeros that all operands are to
/// get behind their own. Nothing where cuDNN is not to be asked.
std::optional<std::int64_t> sdpa_rows_of_zeros(const Queue& queue, const TensorView& q,
                                               const TensorView& k, const AttentionOptions& options,
                                               bool backward);

/// Queues it. False where cuDNN has no plan: the results are to come from elsewhere then.
bool sdpa_forward(const Queue& queue, const SdpaOperands& operands,
                  const AttentionOptions& options);
bool sdpa_backward(const Queue& queue, const SdpaOperands& operands,
                   const AttentionOptions& options);

}  // namespace cairn::kernels::cuda
