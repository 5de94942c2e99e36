// The last module of a chain and its loss as one operation.
#pragma once

#include "cairn/checkpointing/recompute.h"
#include "cairn/core/tensor.h"

namespace cairn::nn {
class Linear;
class Sequential;
}  // namespace cairn::nn

namespace cairn::checkpointing {

inline constexpr const char* kTrainingPlanner = "plan_training";

/// A Linear without an activation at the model's end; null: there is none.
nn::Linear* fusable_end(nn::Sequential& model);
/// Its cross-entropy, without logits in memory.
Segment fused_end(const nn::Linear& linear, const Tensor& target);

}  // namespace cairn::checkpointing
