// A product in cuBLASLt's terms, and what it takes to ask cuBLASLt about it.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <type_traits>

#include "cuda/cublaslt/gemm.h"

namespace cairn::kernels::cuda {

void check_cublaslt(cublasStatus_t status, const Queue& queue, const char* call);

template <class T, cublasStatus_t (*kDestroy)(T)>
struct Destroy {
  void operator()(std::remove_pointer_t<T>* handle) const { kDestroy(handle); }
};
template <class T, cublasStatus_t (*kDestroy)(T)>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, Destroy<T, kDestroy>>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// A handle is thread-safe and serves one device; handles live as long as the process.
cublasLtHandle_t handle_for(const Queue& queue);

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm{};
  std::size_t workspace = 0;
};

/// The description of one call. As y^T = b^T a^T, b comes first.
struct Problem {
  Operation operation;
  Layout first, second, result;
  GemmPointers pointers;
  bool wide, accumulate;

  Problem(const Queue& queue, const GemmShape& shape, const GemmPointers& pointers);

  /// Queues it, with the result written to `y`, which lies in memory as the pointers' own.
  cublasStatus_t run(const Queue& queue, const Algorithm& algorithm, void* y) const;
};

}  // namespace cairn::kernels::cuda
