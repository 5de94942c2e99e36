// The plans of attention.
#pragma once

#include "cuda/cudnn/attention_graph.h"
#include "cuda/cudnn/plan.h"

namespace cairn::kernels::cuda {

/// Without any, where cuDNN has nothing for the shape.
std::shared_ptr<Plans> sdpa_plans_for(const SdpaShape& shape);

}  // namespace cairn::kernels::cuda
