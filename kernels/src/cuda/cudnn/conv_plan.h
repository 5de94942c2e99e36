// The plans of convolutions.
#pragma once

#include "cuda/cudnn/conv_graph.h"
#include "cuda/cudnn/plan.h"

namespace cairn::kernels::cuda {

/// Without any, where cuDNN has nothing that is deterministic for the shape.
std::shared_ptr<Plans> conv_plans_for(const ConvShape& shape);

inline std::vector<Argument> conv_arguments(void* x, void* weight, void* y) {
  return {{kConvTensors[0], x}, {kConvTensors[1], weight}, {kConvTensors[2], y}};
}

/// How many images cuDNN takes at once, given its limit on a tensor's elements. Throws Unsupported
/// where one image or the weight is past it.
std::int64_t images_at_once(const char* op, const Shape& x, const Shape& weight, const Shape& y);

}  // namespace cairn::kernels::cuda
