// The plans of attention.
#pragma once

#include "cuda/cudnn/attention_graph.h"
#include "cuda/cudnn/attention_lengths.h"
#include "cuda/cudnn/plan.h"

namespace cairn::kernels::cuda {

inline constexpr const char* kAttentionPlans = "cudnn_attention";  // of the choices

SdpaKind kind_of(const SdpaShape& shape);

/// Without any, where cuDNN has nothing for the shape.
std::shared_ptr<Plans> sdpa_plans_for(const SdpaShape& shape);

}  // namespace cairn::kernels::cuda
