#include "cuda/cublaslt/gemm.h"

#include "cuda/cublaslt/algorithms.h"

namespace cairn::kernels::cuda {

bool gemm(const Queue& queue, const GemmShape& shape, const GemmPointers& pointers) {
  const Problem problem(queue, shape, pointers);
  for (const Algorithm& algorithm : *algorithms_for(queue, shape, problem)) {
    const cublasStatus_t status = problem.run(queue, algorithm, pointers.y);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) continue;  // a heuristic is no promise
    check_cublaslt(status, queue, "cublasLtMatmul");
    return true;
  }
  return false;
}

}  // namespace cairn::kernels::cuda
