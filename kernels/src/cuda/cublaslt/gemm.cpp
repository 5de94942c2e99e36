#include "cuda/cublaslt/gemm.h"

#include <cublasLt.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/bounded_cache.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = 32u << 20;  // the most an algorithm may take, per stream
constexpr std::size_t kKeptChoices = 4096;
constexpr int kMostAlgorithms = 4;

void check(cublasStatus_t status, const Queue& queue, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  core::fail<core::DeviceError>(queue.op(), "expected ", call, " to succeed, got ",
                                cublasLtGetStatusString(status), " (",
                                cublasLtGetStatusName(status), ", ", static_cast<int>(status), ")");
}

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
cublasLtHandle_t handle_for(const Queue& queue) {
  static auto& handles = *new BoundedCache<int, cublasLtHandle_t>(1024);
  return handles.get(queue.device().index, [&] {
    cublasLtHandle_t handle = nullptr;
    check(cublasLtCreate(&handle), queue, "cublasLtCreate");
    return handle;
  });
}

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

/// f32 products are computed in f32, not TF32.
cublasComputeType_t compute_type(const GemmShape& shape) {
  return shape.a.dtype == DType::f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
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
  check(cublasLtMatrixLayoutCreate(&made, data_type(matrix.dtype),
                                   static_cast<std::uint64_t>(columns),
                                   static_cast<std::uint64_t>(rows), matrix.ld),
        queue, "cublasLtMatrixLayoutCreate");
  Layout owned(made);
  const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
    check(cublasLtMatrixLayoutSetAttribute(made, attribute, &value, sizeof(value)), queue,
          "cublasLtMatrixLayoutSetAttribute");
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(shape.batch));
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.batch_stride);
  return owned;
}

/// The description of one call. As y^T = b^T a^T, b comes first.
struct Problem {
  Operation operation;
  Layout first, second, result;

  Problem(const Queue& queue, const GemmShape& shape, const void* bias)
      : first(layout(queue, shape, shape.b, shape.k, shape.n)),
        second(layout(queue, shape, shape.a, shape.m, shape.k)),
        result(layout(queue, shape, shape.y, shape.m, shape.n)) {
    cublasLtMatmulDesc_t made = nullptr;
    const DType scale = shape.a.dtype == DType::f64 ? DType::f64 : DType::f32;
    check(cublasLtMatmulDescCreate(&made, compute_type(shape), data_type(scale)), queue,
          "cublasLtMatmulDescCreate");
    operation.reset(made);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      check(cublasLtMatmulDescSetAttribute(made, attribute, &value, sizeof(value)), queue,
            "cublasLtMatmulDescSetAttribute");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, shape.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, shape.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(shape));
    if (shape.bias > 0) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm{};
  std::size_t workspace = 0;
};
using Algorithms = std::shared_ptr<const std::vector<Algorithm>>;  // the fastest first

Algorithms choose(const Queue& queue, const GemmShape& shape, const Problem& problem) {
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), queue, "cublasLtMatmulPreferenceCreate");
  const Preference preference(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)), queue,
          "cublasLtMatmulPreferenceSetAttribute");
  };
  const auto alignment = [](const GemmMatrix& m) {
    return static_cast<std::uint32_t>(m.alignment);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(shape.b));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(shape.a));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(shape.y));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(shape.y));
  cublasLtMatmulHeuristicResult_t results[kMostAlgorithms];
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_for(queue), problem.operation.get(), problem.first.get(), problem.second.get(),
      problem.result.get(), problem.result.get(), made, kMostAlgorithms, results, &count);
  auto found = std::make_shared<std::vector<Algorithm>>();
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return found;
  check(status, queue, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < count; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS)
      found->push_back({results[i].algo, results[i].workspaceSize});
  }
  return found;
}

}  // namespace

bool gemm(const Queue& queue, const GemmShape& shape, const GemmPointers& pointers) {
  static auto& choices = *new BoundedCache<GemmShape, Algorithms>(kKeptChoices);
  const Problem problem(queue, shape, pointers.bias);
  const cublasLtHandle_t handle = handle_for(queue);
  const Algorithms algorithms = choices.get(shape, [&] { return choose(queue, shape, problem); });

  const double scales[] = {pointers.alpha, shape.accumulate ? 1.0 : 0.0};
  const float scales32[] = {static_cast<float>(scales[0]), static_cast<float>(scales[1])};
  const bool wide = shape.a.dtype == DType::f64;
  const void* const alpha = wide ? static_cast<const void*>(&scales[0]) : &scales32[0];
  const void* const beta = wide ? static_cast<const void*>(&scales[1]) : &scales32[1];
  for (const Algorithm& choice : *algorithms) {
    const auto workspace = queue.workspace(choice.workspace);
    const cublasStatus_t status =
        cublasLtMatmul(handle, problem.operation.get(), alpha, pointers.b, problem.first.get(),
                       pointers.a, problem.second.get(), beta, pointers.y, problem.result.get(),
                       pointers.y, problem.result.get(), &choice.algorithm, workspace->data(),
                       choice.workspace, static_cast<cudaStream_t>(queue.stream()));
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) continue;  // a heuristic is no promise
    check(status, queue, "cublasLtMatmul");
    return true;
  }
  return false;
}

}  // namespace cairn::kernels::cuda
