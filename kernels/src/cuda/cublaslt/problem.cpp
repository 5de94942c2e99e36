#include "cuda/cublaslt/problem.h"

#include <utility>

#include "cairn/core/graph.h"
#include "cuda/bounded_cache.h"

namespace cairn::kernels::cuda {

namespace {

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f64:
      return CUDA_R_64F;
    default:
      return CUDA_R_32F;
  }
}

cublasComputeType_t compute_type(const GemmShape& shape) {
  if (shape.a.dtype == DType::f64) return CUBLAS_COMPUTE_64F;
  return shape.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

cublasLtEpilogue_t epilogue(const GemmShape& shape) {
  switch (shape.activation) {
    case Activation::relu:
      return shape.bias > 0 ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::gelu_tanh:
      return shape.bias > 0 ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Activation::none:
    case Activation::gelu:
      break;
  }
  return shape.bias > 0 ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/// cuBLASLt thinks in columns: a row-major [rows, columns] matrix is its [columns, rows].
Layout layout(const Queue& queue, const GemmShape& shape, const GemmMatrix& matrix,
              std::int64_t rows, std::int64_t columns) {
  if (matrix.transposed) std::swap(rows, columns);
  cublasLtMatrixLayout_t made = nullptr;
  check_cublaslt(cublasLtMatrixLayoutCreate(&made, data_type(matrix.dtype),
                                            static_cast<std::uint64_t>(columns),
                                            static_cast<std::uint64_t>(rows), matrix.ld),
                 queue, "cublasLtMatrixLayoutCreate");
  Layout owned(made);
  const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
    check_cublaslt(cublasLtMatrixLayoutSetAttribute(made, attribute, &value, sizeof(value)), queue,
                   "cublasLtMatrixLayoutSetAttribute");
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(shape.batch));
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.batch_stride);
  return owned;
}

}  // namespace

void check_cublaslt(cublasStatus_t status, const Queue& queue, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  core::fail<core::DeviceError>(queue.op(), "expected ", call, " to succeed, got ",
                                cublasLtGetStatusString(status), " (",
                                cublasLtGetStatusName(status), ", ", static_cast<int>(status), ")");
}

cublasLtHandle_t handle_for(const Queue& queue) {
  static auto& handles = *new BoundedCache<int, cublasLtHandle_t>(1024);
  return handles.get(queue.device().index, [&] {
    core::refuse_in_capture("cublaslt", "a handle that no warm-up has left");
    cublasLtHandle_t handle = nullptr;
    check_cublaslt(cublasLtCreate(&handle), queue, "cublasLtCreate");
    return handle;
  });
}

Problem::Problem(const Queue& queue, const GemmShape& shape, const GemmPointers& data)
    : first(layout(queue, shape, shape.b, shape.k, shape.n)),
      second(layout(queue, shape, shape.a, shape.m, shape.k)),
      result(layout(queue, shape, shape.y, shape.m, shape.n)),
      pointers(data),
      wide(shape.a.dtype == DType::f64),
      accumulate(shape.accumulate) {
  cublasLtMatmulDesc_t made = nullptr;
  check_cublaslt(cublasLtMatmulDescCreate(&made, compute_type(shape),
                                          data_type(wide ? DType::f64 : DType::f32)),
                 queue, "cublasLtMatmulDescCreate");
  operation.reset(made);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    check_cublaslt(cublasLtMatmulDescSetAttribute(made, attribute, &value, sizeof(value)), queue,
                   "cublasLtMatmulDescSetAttribute");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, shape.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, shape.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(shape));
  if (shape.bias > 0) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias);
}

cublasStatus_t Problem::run(const Queue& queue, const Algorithm& choice, void* y) const {
  const double scales[] = {pointers.alpha, accumulate ? 1.0 : 0.0};
  const float scales32[] = {static_cast<float>(scales[0]), static_cast<float>(scales[1])};
  const void* const alpha = wide ? static_cast<const void*>(&scales[0]) : &scales32[0];
  const void* const beta = wide ? static_cast<const void*>(&scales[1]) : &scales32[1];
  const auto workspace = queue.workspace(choice.workspace);
  return cublasLtMatmul(handle_for(queue), operation.get(), alpha, pointers.b, first.get(),
                        pointers.a, second.get(), beta, pointers.y, result.get(), y, result.get(),
                        &choice.algorithm, workspace->data(), choice.workspace,
                        static_cast<cudaStream_t>(queue.stream()));
}

}  // namespace cairn::kernels::cuda
