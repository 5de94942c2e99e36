// The arithmetic of the simulated cuBLASLt: in double, whatever the types in memory.
#pragma once

#include <cstdint>

#include "gpu/sim/cublaslt_problem.h"

namespace cairn::gpusim::cublaslt {

/// The pointers of one call.
struct Pointers {
  const void *a, *b, *c;
  void* d;
  const void* bias;
};

/// One product of a batch: D = activation(alpha op(A) op(B) + beta C + bias).
void multiply_one(const Problem& problem, const Pointers& pointers, double alpha, double beta,
                  std::int64_t number);

}  // namespace cairn::gpusim::cublaslt
