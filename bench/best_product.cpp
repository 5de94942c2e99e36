#include "best_product.h"

#include <cublasLt.h>

#include <chrono>
#include <memory>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"

namespace bench {
namespace {

using namespace cairn;

constexpr int kMostAlgorithms = 32;
constexpr std::size_t kWorkspaceBytes = 64u << 20;

void check(cublasStatus_t status, const char* call) {
  CAIRN_CHECK(status == CUBLAS_STATUS_SUCCESS, "best_product", "expected ", call,
              " to succeed, got ", cublasLtGetStatusString(status));
}

cudaDataType_t data_type(DType dtype) {
  if (dtype == DType::f16) return CUDA_R_16F;
  return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// cuBLASLt thinks in columns: a row-major matrix is its transpose to it, and so y^T = b^T a^T.
struct Matrix {
  explicit Matrix(const TensorView& x) : transposed(x.strides[1] != 1) {
    const TensorView stored = transposed ? x.transpose(0, 1) : x;
    check(cublasLtMatrixLayoutCreate(&layout, data_type(x.dtype),
                                     static_cast<std::uint64_t>(stored.size(1)),
                                     static_cast<std::uint64_t>(stored.size(0)), stored.strides[0]),
          "cublasLtMatrixLayoutCreate");
  }
  ~Matrix() { cublasLtMatrixLayoutDestroy(layout); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  cublasLtMatrixLayout_t layout = nullptr;
  bool transposed;
};

/// A product with what it needs to run; lives as long as its runs.
class Product {
 public:
  Product(const TensorView& a, const TensorView& b, const Tensor& y)
      : first_(b),
        second_(a),
        result_(y),
        a_(a.data),
        b_(b.data),
        y_(y),
        workspace_(Tensor::empty({static_cast<std::int64_t>(kWorkspaceBytes)}, DType::u8)) {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    check(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, first_.transposed);
    set(CUBLASLT_MATMUL_DESC_TRANSB, second_.transposed);
    choose();
  }
  ~Product() {
    cublasLtMatmulDescDestroy(operation_);
    cublasLtDestroy(handle_);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  void run() const { check(run(best_), "cublasLtMatmul"); }

 private:
  void set(cublasLtMatmulDescAttributes_t attribute, bool transposed) {
    const cublasOperation_t value = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }

  cublasStatus_t run(const cublasLtMatmulHeuristicResult_t& found) const {
    const float one = 1.0F, zero = 0.0F;
    void* const y = y_.raw_data();
    void* const stream = core::Stream::current(y_.device()).native();
    return cublasLtMatmul(handle_, operation_, &one, b_, first_.layout, a_, second_.layout, &zero,
                          y, result_.layout, y, result_.layout, &found.algo, workspace_.raw_data(),
                          found.workspaceSize, static_cast<cudaStream_t>(stream));
  }

  double seconds(const cublasLtMatmulHeuristicResult_t& found, int runs) const {
    const core::Stream stream = core::Stream::current(y_.device());
    stream.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < runs; ++i) {
      if (run(found) != CUBLAS_STATUS_SUCCESS) return 1e9;  // a heuristic is no promise
    }
    stream.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void choose() {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &kWorkspaceBytes, sizeof(kWorkspaceBytes)),
          "cublasLtMatmulPreferenceSetAttribute");
    const std::uint32_t aligned = 16;  // bytes, of every row
    for (const auto matrix :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      check(cublasLtMatmulPreferenceSetAttribute(preference, matrix, &aligned, sizeof(aligned)),
            "cublasLtMatmulPreferenceSetAttribute");
    }
    cublasLtMatmulHeuristicResult_t found[kMostAlgorithms];
    int count = 0;
    const auto status = cublasLtMatmulAlgoGetHeuristic(
        handle_, operation_, first_.layout, second_.layout, result_.layout, result_.layout,
        preference, kMostAlgorithms, found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    double least = 1e9;
    for (int i = 0; i < count; ++i) {
      if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
      seconds(found[i], 1);
      const double took = seconds(found[i], 10);
      if (took < least) least = took, best_ = found[i];
    }
    CAIRN_CHECK(least < 1e9, "best_product", "expected an algorithm that runs, got ", count,
                " that do not");
  }

  Matrix first_, second_, result_;
  const void *a_, *b_;
  Tensor y_, workspace_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatmulHeuristicResult_t best_{};
};

}  // namespace

Run best_product(const TensorView& a, const TensorView& b, const Tensor& y) {
  const auto product = std::make_shared<Product>(a, b, y);
  return [product] { product->run(); };
}

}  // namespace bench
