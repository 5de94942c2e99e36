// Which of cuBLASLt's algorithms computes a product: the fastest of those that its heuristic
// proposes, timed at the first use of a class of shapes and kept (choices.h), by device and library
// version.
#pragma once

#include <memory>
#include <vector>

#include "cuda/cublaslt/problem.h"

namespace cairn::kernels::cuda {

/// The fastest first; none where cuBLASLt knows none. Products that are too small to be timed, all
/// within a graph's capture and where CAIRN_PRODUCTS asks for no timing: in the heuristic's order.
/// A timing of n proposals is 4 n products, after which the host waits once.
std::shared_ptr<const std::vector<Algorithm>> algorithms_for(const Queue& queue,
                                                             const GemmShape& shape,
                                                             const Problem& problem);

}  // namespace cairn::kernels::cuda
