// What a program describes to cuBLASLt: layouts, an operation, and the product that they make.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <optional>
#include <string>

#include "gpu/sim/elements.h"

namespace cairn::gpusim::cublaslt {

struct Layout : cublasLtMatrixLayoutOpaque_t {
  std::uint32_t type = 0;
  std::int32_t order = CUBLASLT_ORDER_COL;
  std::uint64_t rows = 0, columns = 0;
  std::int64_t ld = 0;
  std::int32_t batch = 1;
  std::int64_t batch_stride = 0;
};

struct Operation : cublasLtMatmulDescOpaque_t {
  std::int32_t compute = 0, scale = 0;
  std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  std::int32_t transposes[2] = {CUBLAS_OP_N, CUBLAS_OP_N};
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  std::int32_t bias_type = -1;  // as D
};

std::optional<Element> element_of(std::uint32_t type);

/// A product as the descriptors tell it.
struct Problem {
  Operation operation;
  Layout a, b, c, d;

  bool transposed(int operand) const { return operation.transposes[operand] != CUBLAS_OP_N; }
  bool wide() const { return operation.scale == CUDA_R_64F; }
  bool tf32() const { return operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32; }
  bool has_bias() const { return (operation.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
  std::uint64_t m() const { return d.rows; }
  std::uint64_t n() const { return d.columns; }
  std::uint64_t k() const { return transposed(0) ? a.rows : a.columns; }
  Element bias_element() const {
    const auto type = static_cast<std::uint32_t>(operation.bias_type);
    return *element_of(operation.bias_type < 0 ? d.type : type);
  }
};

/// What an algorithm of another size has to have in common.
std::string describe_kind(const Problem& problem);

/// All that an algorithm is chosen for, pointers aside.
std::string describe(const Problem& problem);

/// What the library answers to a problem: INVALID_VALUE where sizes do not fit one another,
/// NOT_SUPPORTED outside of the tables in cublasLtMatmul's documentation.
cublasStatus_t check(const Problem& problem);

}  // namespace cairn::gpusim::cublaslt
