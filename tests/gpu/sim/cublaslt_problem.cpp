#include "gpu/sim/cublaslt_problem.h"

#include <cstdint>
#include <string>

namespace cairn::gpusim::cublaslt {

namespace {

void describe(std::string& text, const char* name, const Layout& layout) {
  for (const std::int64_t value :
       {std::int64_t{layout.type}, static_cast<std::int64_t>(layout.rows),
        static_cast<std::int64_t>(layout.columns), layout.ld, std::int64_t{layout.batch},
        layout.batch_stride}) {
    text += (name != nullptr ? std::string(" ") + name + " " : std::string("/")) +
            std::to_string(value);
    name = nullptr;
  }
}

bool fits(const Layout& layout) {
  const bool apart = layout.ld >= static_cast<std::int64_t>(layout.rows);
  return layout.order == CUBLASLT_ORDER_COL && layout.rows > 0 && layout.columns > 0 && apart &&
         layout.batch > 0;
}

/// The sizes fit one another; else the library answers INVALID_VALUE.
bool is_consistent(const Problem& p) {
  const std::uint64_t b_rows = p.transposed(1) ? p.b.columns : p.b.rows;
  const std::uint64_t b_columns = p.transposed(1) ? p.b.rows : p.b.columns;
  const std::uint64_t a_rows = p.transposed(0) ? p.a.columns : p.a.rows;
  const bool shapes = fits(p.a) && fits(p.b) && fits(p.c) && fits(p.d) && p.k() == b_rows &&
                      a_rows == p.m() && b_columns == p.n() && p.c.rows == p.m() &&
                      p.c.columns == p.n();
  const bool batches = p.a.batch == p.d.batch && p.b.batch == p.d.batch && p.c.batch == p.d.batch;
  return shapes && batches && p.c.type == p.d.type;
}

/// Rows of the tables in cublasLtMatmul's documentation: A and B, and C and D, of one type each.
bool has_supported_types(const Problem& p) {
  const Operation& op = p.operation;
  if (p.a.type != p.b.type) return false;
  if (op.compute == CUBLAS_COMPUTE_64F || op.compute == CUBLAS_COMPUTE_64F_PEDANTIC) {
    return op.scale == CUDA_R_64F && p.a.type == CUDA_R_64F && p.d.type == CUDA_R_64F &&
           op.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
  }
  const bool narrow = op.compute == CUBLAS_COMPUTE_32F ||
                      op.compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                      (p.tf32() && p.a.type == CUDA_R_32F);
  if (!narrow || op.scale != CUDA_R_32F) return false;
  if (p.a.type == CUDA_R_32F) return p.d.type == CUDA_R_32F;
  const bool half = p.a.type == CUDA_R_16F || p.a.type == CUDA_R_16BF;
  return half && (p.d.type == p.a.type || p.d.type == CUDA_R_32F);
}

bool has_supported_epilogue(const Problem& p) {
  switch (p.operation.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_GELU:
      return true;
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
      return p.operation.bias_type < 0 ||
             static_cast<std::uint32_t>(p.operation.bias_type) == p.d.type;
    default:
      return false;
  }
}

bool is_small(const Layout& layout) {
  return layout.rows <= INT32_MAX && layout.columns <= INT32_MAX;
}

}  // namespace

std::optional<Element> element_of(std::uint32_t type) {
  switch (type) {
    case CUDA_R_16F:
      return Element::f16;
    case CUDA_R_16BF:
      return Element::bf16;
    case CUDA_R_32F:
      return Element::f32;
    case CUDA_R_64F:
      return Element::f64;
    default:
      return {};
  }
}

std::string describe_kind(const Problem& problem) {
  const Operation& op = problem.operation;
  return "compute " + std::to_string(op.compute) + ", scale " + std::to_string(op.scale) +
         ", transposes " + std::to_string(op.transposes[0]) + std::to_string(op.transposes[1]) +
         ", epilogue " + std::to_string(op.epilogue) + ", bias type " +
         std::to_string(op.bias_type) + ", types " + std::to_string(problem.a.type) + " " +
         std::to_string(problem.b.type) + " " + std::to_string(problem.d.type);
}

std::string describe(const Problem& problem) {
  std::string text = describe_kind(problem) + "; type/rows/columns/ld/batch/stride:";
  describe(text, "A", problem.a);
  describe(text, "B", problem.b);
  describe(text, "C", problem.c);
  describe(text, "D", problem.d);
  return text;
}

cublasStatus_t check(const Problem& p) {
  if (!is_consistent(p)) return CUBLAS_STATUS_INVALID_VALUE;
  const bool small = is_small(p.a) && is_small(p.b) && is_small(p.d);
  const bool host_scalars = p.operation.pointer_mode == CUBLASLT_POINTER_MODE_HOST;
  if (!small || !host_scalars || !has_supported_types(p) || !has_supported_epilogue(p))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace cairn::gpusim::cublaslt
