// The simulated cuBLASLt: right products, and planted breaches of its contract.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <cmath>

#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

using gpusim::Element;

constexpr cudaDataType_t type_of(Element element) {
  switch (element) {
    case Element::f16:
      return CUDA_R_16F;
    case Element::bf16:
      return CUDA_R_16BF;
    case Element::f32:
      return CUDA_R_32F;
    case Element::f64:
      break;
  }
  return CUDA_R_64F;
}

#define OK(call) ASSERT_EQ(call, CUBLAS_STATUS_SUCCESS)

cublasLtHandle_t new_handle() {
  cublasLtHandle_t handle = nullptr;
  EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
  return handle;
}

template <class Object, class Which, class Value>
cublasStatus_t set(cublasStatus_t (*setter)(Object, Which, const void*, size_t), Object object,
                   Which which, Value value) {
  return setter(object, which, &value, sizeof(value));
}

cublasLtMatrixLayout_t layout(Element element, std::uint64_t rows, std::uint64_t columns,
                              std::int64_t ld, int batch = 1, std::int64_t stride = 0) {
  cublasLtMatrixLayout_t made = nullptr;
  EXPECT_EQ(cublasLtMatrixLayoutCreate(&made, type_of(element), rows, columns, ld), 0);
  EXPECT_EQ(set(cublasLtMatrixLayoutSetAttribute, made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch),
            0);
  EXPECT_EQ(set(cublasLtMatrixLayoutSetAttribute, made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                stride),
            0);
  return made;
}

/// D = alpha op(A) op(B) + beta C, columns first.
struct Product {
  Element in = Element::f32, out = Element::f32;
  int m = 6, n = 4, k = 5;  // odd: wants workspace
  bool transposed_a = false, transposed_b = false;
  int gap = 0;  // between columns, in elements
  int batch = 1;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float alpha = 1.0f, beta = 0.0f;
  std::uint32_t alignment = 2;  // promised
  std::uint64_t most_workspace = 1 << 20;

  int rows_a() const { return transposed_a ? k : m; }
  int columns_a() const { return transposed_a ? m : k; }
  int rows_b() const { return transposed_b ? n : k; }
  int columns_b() const { return transposed_b ? k : n; }
  static std::size_t size(int rows, int columns) {
    return static_cast<std::size_t>(rows * columns);
  }
  std::size_t stride_a() const { return size(rows_a() + gap, columns_a()); }
  std::size_t stride_b() const { return size(rows_b() + gap, columns_b()); }
  std::size_t stride_d() const { return size(m + gap, n); }
};

/// The descriptors, memory and heuristic's answer of a product.
struct Prepared {
  Product p;
  std::vector<double> a_values, b_values, bias_values;
  DeviceValues a, b, d, bias, workspace;
  cublasLtHandle_t handle = new_handle();
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a_as, b_as, d_as;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  std::vector<cublasLtMatmulHeuristicResult_t> results;

  explicit Prepared(const Product& product)
      : p(product),
        a_values(random(p.in, p.stride_a(), 1)),
        b_values(random(p.in, p.stride_b(), 2)),
        bias_values(rounded(p.out, random_values(p.m, 3))),
        a(p.in, a_values),
        b(p.in, b_values),
        d(p.out, p.stride_d() * static_cast<std::size_t>(p.batch)),
        bias(p.out, bias_values),
        workspace(Element::f32, 1 << 18),
        a_as(strided(p.in, p.rows_a(), p.columns_a(), p.stride_a())),
        b_as(strided(p.in, p.rows_b(), p.columns_b(), p.stride_b())),
        d_as(strided(p.out, p.m, p.n, p.stride_d())) {
    EXPECT_EQ(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), 0);
    set_operation(CUBLASLT_MATMUL_DESC_TRANSA, p.transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_operation(CUBLASLT_MATMUL_DESC_TRANSB, p.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_operation(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    if (p.epilogue & CUBLASLT_EPILOGUE_BIAS)
      set_operation(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.data());
    choose();
  }

  std::vector<double> random(Element element, std::size_t stride, std::uint64_t seed) const {
    return rounded(element, random_values(static_cast<std::int64_t>(stride) * p.batch, seed));
  }
  cublasLtMatrixLayout_t strided(Element element, int rows, int columns, std::size_t stride) const {
    return layout(element, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns),
                  rows + p.gap, p.batch, static_cast<std::int64_t>(stride));
  }
  template <class Value>
  void set_operation(cublasLtMatmulDescAttributes_t which, Value value) {
    EXPECT_EQ(set(cublasLtMatmulDescSetAttribute, operation, which, value), 0);
  }

  void choose() {
    cublasLtMatmulPreference_t preference = nullptr;
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), 0);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
      EXPECT_EQ(set(cublasLtMatmulPreferenceSetAttribute, preference, which, value), 0);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, p.most_workspace);
    for (const auto which :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(which, p.alignment);
    results.resize(8);
    int count = 0;
    status = cublasLtMatmulAlgoGetHeuristic(handle, operation, a_as, b_as, d_as, d_as, preference,
                                            8, results.data(), &count);
    results.resize(static_cast<std::size_t>(count));
    cublasLtMatmulPreferenceDestroy(preference);
  }

  cublasStatus_t run(std::size_t result = 0) {
    return run_with(a.data(), workspace.data(), results.at(result).workspaceSize, result);
  }
  cublasStatus_t run_with(const void* a_data, void* space, std::size_t bytes,
                          std::size_t result = 0) {
    return cublasLtMatmul(handle, operation, &p.alpha, a_data, a_as, b.data(), b_as, &p.beta,
                          d.data(), d_as, d.data(), d_as, &results.at(result).algo, space, bytes,
                          nullptr);
  }
  cublasStatus_t run_and_wait() {
    const cublasStatus_t answer = run();
    must(cudaDeviceSynchronize());
    return answer;
  }

  double at(const std::vector<double>& values, int rows, std::size_t stride, bool transposed,
            int matrix, int row, int column) const {
    if (transposed) std::swap(row, column);
    return values[static_cast<std::size_t>(matrix) * stride + Product::size(column, rows + p.gap) +
                  static_cast<std::size_t>(row)];
  }
  /// Element (row, column) of a matrix of the batch, before it is rounded.
  double expected(int matrix, int row, int column, double before) const {
    double sum = 0.0;
    for (int k = 0; k < p.k; ++k) {
      sum += at(a_values, p.rows_a(), p.stride_a(), p.transposed_a, matrix, row, k) *
             at(b_values, p.rows_b(), p.stride_b(), p.transposed_b, matrix, k, column);
    }
    double y = double{p.alpha} * sum + (p.beta == 0.0f ? 0.0 : double{p.beta} * before);
    if (p.epilogue & CUBLASLT_EPILOGUE_BIAS) y += bias_values[static_cast<std::size_t>(row)];
    if (p.epilogue & CUBLASLT_EPILOGUE_RELU) return y > 0.0 ? y : 0.0;
    if (!(p.epilogue & CUBLASLT_EPILOGUE_GELU)) return y;
    return 0.5 * y *
           (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (y + 0.044715 * y * y * y)));
  }
  void expect_right(double before = 0.0) const {
    const std::vector<double> actual = d.values();
    for (int matrix = 0; matrix < p.batch; ++matrix) {
      for (int column = 0; column < p.n; ++column) {
        for (int row = 0; row < p.m; ++row) {
          const double want = rounded(p.out, {expected(matrix, row, column, before)})[0];
          EXPECT_NEAR(at(actual, p.m, p.stride_d(), false, matrix, row, column), want,
                      std::abs(want) * 1e-7)
              << matrix << " " << row << " " << column;
        }
      }
    }
  }
};

using CublasLtDeathTest = CublasLt;

TEST(Elements, HalvesRoundToNearestEven) {
  for (const Element element : {Element::f16, Element::bf16}) {
    const int infinity = element == Element::f16 ? 0x7c00 : 0x7f80;
    for (int bits = 0; bits < infinity; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const auto next = static_cast<std::uint16_t>(bits + 1);
      const double x = gpusim::load(element, &pattern);
      double above = gpusim::load(element, &next);
      if (bits + 1 == infinity) above = std::ldexp(1.0, std::ilogb(x) + 1);
      std::uint16_t exact = 0, halfway = 0, past = 0;
      gpusim::store(element, &exact, x);
      gpusim::store(element, &halfway, -(x + above) / 2);
      gpusim::store(element, &past, std::nextafter((x + above) / 2, above));
      ASSERT_EQ(exact, bits);
      ASSERT_EQ(halfway, 0x8000 | (bits + (bits & 1)));
      ASSERT_EQ(past, bits + 1);
    }
  }
}

TEST_F(CublasLt, MultipliesInEveryLayout) {
  for (const bool transposed_a : {false, true}) {
    for (const bool transposed_b : {false, true}) {
      for (const int gap : {0, 3}) {
        for (const int batch : {1, 3}) {
          Product p;
          p.transposed_a = transposed_a, p.transposed_b = transposed_b;
          p.gap = gap, p.batch = batch, p.alpha = 0.5f;
          Prepared prepared(p);
          OK(prepared.run());
          prepared.expect_right();
        }
      }
    }
  }
}

TEST_F(CublasLt, MultipliesEveryType) {
  const std::pair<Element, Element> pairs[] = {{Element::f16, Element::f16},
                                               {Element::f16, Element::f32},
                                               {Element::bf16, Element::bf16},
                                               {Element::bf16, Element::f32},
                                               {Element::f32, Element::f32}};
  for (const auto& [in, out] : pairs) {
    for (const auto epilogue :
         {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_GELU,
          CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU_BIAS}) {
      Product p;
      p.in = in, p.out = out, p.epilogue = epilogue;
      Prepared prepared(p);
      OK(prepared.run());
      prepared.expect_right();
    }
  }
}

TEST_F(CublasLt, AddsToCUnlessBetaIsZero) {
  Product p;
  p.beta = 2.0f;
  Prepared adds(p);
  adds.d.set(std::vector<double>(24, 3.0));
  OK(adds.run());
  adds.expect_right(3.0);
  p.beta = 0.0f;
  Prepared plain(p);  // its C is poison
  OK(plain.run());
  plain.expect_right();
}

TEST_F(CublasLt, EveryCandidateOfTheHeuristicRuns) {
  Prepared prepared(Product{});
  ASSERT_EQ(prepared.results.size(), 3u);
  EXPECT_GT(prepared.results[0].workspaceSize, 0u) << "odd sizes want workspace first";
  for (std::size_t i = 0; i < prepared.results.size(); ++i) {
    OK(prepared.run(i));
    prepared.expect_right();
  }
}

TEST_F(CublasLt, TheHeuristicKeepsToTheWorkspaceAllowed) {
  Product p;
  p.most_workspace = 0;
  const Prepared prepared(p);
  ASSERT_EQ(prepared.results.size(), 1u);
  EXPECT_EQ(prepared.results[0].workspaceSize, 0u);
}

TEST_F(CublasLt, AnswersAttributesOfAWrongSize) {
  const cublasLtMatrixLayout_t made = layout(Element::f32, 8, 4, 8);
  EXPECT_EQ(set(cublasLtMatrixLayoutSetAttribute, made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                std::int64_t{3}),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(
      set(cublasLtMatrixLayoutSetAttribute, made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 32),
      CUBLAS_STATUS_INVALID_VALUE);
  std::int64_t ld = 0;
  std::size_t written = 0;
  OK(cublasLtMatrixLayoutGetAttribute(made, CUBLASLT_MATRIX_LAYOUT_LD, &ld, sizeof(ld), &written));
  EXPECT_EQ(ld, 8);
  EXPECT_EQ(written, sizeof(ld));
}

TEST_F(CublasLt, AnswersWhatDoesNotFit) {
  Product p;
  p.gap = -1;  // columns that overlap
  EXPECT_EQ(Prepared(p).status, CUBLAS_STATUS_INVALID_VALUE);
  p.gap = 0, p.in = Element::f32, p.out = Element::f16;
  EXPECT_EQ(Prepared(p).status, CUBLAS_STATUS_NOT_SUPPORTED);
  p.in = Element::f64, p.out = Element::f64;  // of an f32 compute type
  EXPECT_EQ(Prepared(p).status, CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST_F(CublasLt, AnswersWorkspaceThatIsTooSmall) {
  Prepared prepared(Product{});
  const std::size_t bytes = prepared.results[0].workspaceSize;
  EXPECT_EQ(prepared.run_with(prepared.a.data(), prepared.workspace.data(), bytes - 1),
            CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasLt, AnswersInjectedFaults) {
  Prepared prepared(Product{});
  gpusim::inject("cublasLtMatmulAlgoGetHeuristic", 1, -1);
  prepared.choose();
  OK(prepared.status);
  EXPECT_TRUE(prepared.results.empty());
  gpusim::inject("cublasLtMatmulAlgoGetHeuristic", 1, CUBLAS_STATUS_NOT_SUPPORTED);
  prepared.choose();
  EXPECT_EQ(prepared.status, CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST_F(CublasLt, HeadsBetweenOneAnothersRowsDoNotRace) {
  Product p;
  p.gap = p.m = 4;  // two results of four rows, interleaved
  Prepared prepared(p);
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    must(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    auto* const d = static_cast<float*>(prepared.d.data()) + i * p.m;
    OK(cublasLtMatmul(prepared.handle, prepared.operation, &p.alpha, prepared.a.data(),
                      prepared.a_as, prepared.b.data(), prepared.b_as, &p.beta, d, prepared.d_as, d,
                      prepared.d_as, &prepared.results[1].algo, nullptr, 0, streams[i]));
  }
  prepared.expect_right();
}

TEST_F(CublasLtDeathTest, AlgorithmOfAnotherProblem) {
  Prepared prepared(Product{});
  prepared.b_as = prepared.strided(Element::f32, 5, 4, 21);
  EXPECT_DEATH(prepared.run(),
               "gpusim: cublasLt contract: .*for what it was chosen for .*/20.*/21");
  cublasLtMatmulAlgo_t made_up{};
  prepared.results[0].algo = made_up;
  EXPECT_DEATH(prepared.run(), "gpusim: cublasLt contract: .*from the heuristic, got other bytes");
}

TEST_F(CublasLtDeathTest, PointersLessAlignedThanPromised) {
  Product p;
  p.m = p.k = p.n = 8, p.alignment = 16;
  Prepared prepared(p);
  void* const space = prepared.workspace.data();
  const std::size_t bytes = prepared.results[1].workspaceSize;
  auto* const a = static_cast<char*>(prepared.a.data());
  EXPECT_DEATH(prepared.run_with(a + 8, space, bytes, 1),
               "gpusim: cublasLt contract: .*A aligned to 16 bytes.*got 8");
  EXPECT_DEATH(prepared.run_with(a, static_cast<char*>(space) + 64, bytes, 1),
               "gpusim: cublasLt contract: .*workspace aligned to 256 bytes");
}

TEST_F(CublasLtDeathTest, RowsOrMatricesLessAlignedThanPromised) {
  Product p;
  p.m = p.k = p.n = 8, p.alignment = 16;
  p.gap = 1;
  EXPECT_DEATH(Prepared(p).run(),
               "gpusim: cublasLt contract: .*of A aligned to the 16 bytes .* got .* of 4");
  p.gap = 0, p.batch = 2;
  Prepared apart(p);
  apart.a_as = apart.strided(Element::f32, 8, 8, 62);
  apart.choose();
  EXPECT_DEATH(apart.run(),
               "gpusim: cublasLt contract: .*of A aligned to the 16 bytes .* got .* of 8");
}

TEST_F(CublasLtDeathTest, BiasLessAlignedThanWhenChosen) {
  Product p;
  p.epilogue = CUBLASLT_EPILOGUE_BIAS;
  Prepared prepared(p);
  prepared.set_operation(CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                         static_cast<void*>(static_cast<char*>(prepared.bias.data()) + 4));
  EXPECT_DEATH(prepared.run(), "gpusim: cublasLt contract: .*bias aligned to 256.*got 4");
}

TEST_F(CublasLtDeathTest, WorkspacePastItsAllocation) {
  Prepared prepared(Product{});
  const DeviceValues little(Element::f32, 16);
  EXPECT_DEATH(prepared.run_with(prepared.a.data(), little.data(), 1 << 20),
               "gpusim: cublasLt contract: .*workspace of 1048576 bytes as told, got 64");
}

TEST_F(CublasLtDeathTest, MatrixPastItsAllocation) {
  Prepared prepared(Product{});
  auto* const a = static_cast<char*>(prepared.a.data());
  EXPECT_DEATH(
      {
        prepared.run_with(a + 16, prepared.workspace.data(), prepared.results[0].workspaceSize);
        cudaDeviceSynchronize();
      },
      "gpusim: memory: a read of .*outside the allocation; running 'cublasLtMatmul'");
}

TEST_F(CublasLtDeathTest, UndefinedInput) {
  Prepared prepared(Product{});
  const DeviceValues fresh(Element::f32, 64);
  EXPECT_DEATH(
      {
        prepared.run_with(fresh.data(), prepared.workspace.data(), 1 << 20);
        cudaDeviceSynchronize();
      },
      "gpusim: undefined value: ");
  prepared.p.beta = 1.0f;
  EXPECT_DEATH(prepared.run_and_wait(), "gpusim: undefined value: ");
}

TEST_F(CublasLtDeathTest, HandleOfAnotherDevice) {
  Prepared prepared(Product{});
  must(cudaSetDevice(1));
  const cublasLtHandle_t other = new_handle();
  EXPECT_DEATH(prepared.run(), "gpusim: cublasLt contract: .*handle of the current device 1");
  must(cudaSetDevice(0));
  prepared.handle = other;
  EXPECT_DEATH(prepared.run(), "gpusim: cublasLt contract: .*got a handle of 1");
}

TEST_F(CublasLtDeathTest, BatchOfResultsInOnePlace) {
  Product p;
  p.batch = 2;
  Prepared prepared(p);
  prepared.d_as = prepared.strided(Element::f32, p.m, p.n, 0);
  prepared.choose();
  EXPECT_DEATH(prepared.run(), "gpusim: cublasLt contract: .*batch's results apart");
}

TEST_F(CublasLtDeathTest, UseAfterDestroy) {
  Prepared prepared(Product{});
  OK(cublasLtMatrixLayoutDestroy(prepared.b_as));
  EXPECT_DEATH(prepared.run(), "gpusim: use after destroy: .*matrix layout");
  OK(cublasLtDestroy(prepared.handle));
  EXPECT_DEATH(prepared.run(), "gpusim: use after destroy: .*cublasLt handle");
}

}  // namespace
}  // namespace cairn::test
