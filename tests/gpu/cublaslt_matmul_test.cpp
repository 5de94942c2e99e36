// Cairn's products through the simulated cuBLASLt: what they make of refusals, alignments and
// captures, and how they choose between candidates.
#include <cublasLt.h>
#include <gmock/gmock.h>

#include <cmath>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/matmul.h"
#include "cairn/kernels/product_choices.h"
#include "cairn/kernels/tf32.h"
#include "gpu/timed_choices.h"
#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Device kGpu{core::DeviceType::cuda, 0};

std::vector<double> naive(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  const auto m = static_cast<std::size_t>(a.size(0)), k = static_cast<std::size_t>(a.size(1)),
             n = static_cast<std::size_t>(b.size(1));
  std::vector<double> sums(m * n, 0.0);
  for (std::size_t i = 0; i < m * n * k; ++i)
    sums[i / k] += x[i / (n * k) * k + i % k] * y[i % k * n + i / k % n];
  return sums;
}

TEST_F(CublasLt, MatmulTakesTheNextCandidateWhereOneRefuses) {
  const Tensor a = random_tensor({5, 7}, DType::f32, kGpu, 1);
  const Tensor b = random_tensor({7, 3}, DType::f32, kGpu, 2);
  const Tensor y = Tensor::empty({5, 3}, DType::f32, kGpu);
  gpusim::inject("cublasLtMatmul", 1, CUBLAS_STATUS_NOT_SUPPORTED);
  const CallCount products("cublasLtMatmul");
  kernels::matmul(a.view(), b.view(), y.view());
  expect_close(y, naive(a, b), 1e-6, 1e-6);
  EXPECT_EQ(products(), 2u);
}

TEST_F(CublasLt, MatmulFailsWhereEveryCandidateRefuses) {
  const Tensor a = random_tensor({5, 7}, DType::f32, kGpu, 1);
  const Tensor b = random_tensor({7, 3}, DType::f32, kGpu, 2);
  const Tensor y = Tensor::empty({5, 3}, DType::f32, kGpu);
  const auto multiply = [&] { kernels::matmul(a.view(), b.view(), y.view()); };
  gpusim::inject("cublasLtMatmul", 1, CUBLAS_STATUS_NOT_SUPPORTED, true);
  EXPECT_THAT(multiply, ThrowsMessage<core::DeviceError>(HasSubstr("to have an algorithm")));
  gpusim::clear_injected();
  gpusim::inject("cublasLtMatmul", 1, CUBLAS_STATUS_EXECUTION_FAILED);
  EXPECT_THAT(multiply, ThrowsMessage<core::DeviceError>(HasSubstr("EXECUTION_FAILED")));
  multiply();
  expect_close(y, naive(a, b), 1e-6, 1e-6);
}

TEST_F(CublasLt, MatmulFusesNothingWhereTheFusedProductIsRefused) {
  const Tensor a = random_tensor({6, 9}, DType::f32, kGpu, 1);
  const Tensor b = random_tensor({9, 4}, DType::f32, kGpu, 2);
  const Tensor bias = Tensor::full({4}, 2.0, DType::f32, kGpu);
  const Tensor y = Tensor::empty({6, 4}, DType::f32, kGpu);
  gpusim::inject("cublasLtMatmulAlgoGetHeuristic", 1, -1);
  kernels::MatmulOptions options;
  options.bias = bias.view();
  kernels::matmul(a.view(), b.view(), y.view(), options);
  auto expected = naive(a, b);
  for (double& value : expected) value += 2.0;
  expect_close(y, expected, 1e-6, 1e-6);
}

TEST_F(CublasLt, MatmulTakesABiasOfAnyAlignment) {
  const Tensor a = random_tensor({8, 16}, DType::bf16, kGpu, 1);
  const Tensor b = random_tensor({16, 8}, DType::bf16, kGpu, 2);
  const Tensor biases = Tensor::full({256}, 2.0, DType::bf16, kGpu);
  const Tensor y = Tensor::empty({8, 8}, DType::bf16, kGpu);
  auto expected = naive(a, b);
  for (double& value : expected) value += 2.0;
  for (const std::int64_t begin : {0, 8, 1, 32, 64, 4}) {
    kernels::MatmulOptions options;
    options.bias = biases.view().slice(0, begin, begin + 8);
    kernels::matmul(a.view(), b.view(), y.view(), options);
    expect_close(y, expected, 0x1p-7, 1e-2, std::to_string(begin));
  }
}

/// Only the distance of the matrices is no multiple of 16 bytes.
TEST_F(CublasLt, MatmulTakesBatchesAtAnyDistance) {
  const Tensor all = random_tensor({65 + 64}, DType::f32, kGpu, 1);
  const TensorView a(all.raw_data(), {2, 8, 8}, {65, 8, 1}, DType::f32, kGpu);
  const Tensor b = random_tensor({2, 8, 8}, DType::f32, kGpu, 2);
  const Tensor y = Tensor::empty({2, 8, 8}, DType::f32, kGpu);
  kernels::matmul(a, b.view(), y.view());
  for (std::int64_t i = 0; i < 2; ++i) {
    const Tensor one = y.alias(y.view().select(0, i));
    expect_close(one, naive(all.alias(a.select(0, i)), b.alias(b.view().select(0, i))), 1e-6, 1e-6);
  }
}

TEST_F(CublasLt, AttentionOverSlicesIsOneProductForAHeadOrASequence) {
  const std::int64_t T = 5, D = 4;
  for (const auto& [B, H] : {std::pair<std::int64_t, std::int64_t>{6, 2}, {2, 6}}) {
    const Tensor qkv = random_tensor({B, T, 3 * H * D}, DType::f32, kGpu, 3);
    const auto heads = [&](int part) {
      return qkv.view()
          .slice(2, part * H * D, (part + 1) * H * D)
          .reshape({B, T, H, D})
          .transpose(1, 2);
    };
    const Tensor y = Tensor::empty({B, H, T, T}, DType::f32, kGpu);
    const CallCount products("cublasLtMatmul");
    kernels::matmul(heads(0), heads(1).transpose(-1, -2), y.view());
    EXPECT_EQ(products(), 2u);
    const Tensor last = y.alias(y.view().select(0, B - 1).select(0, H - 1));
    const Tensor q = qkv.alias(heads(0).select(0, B - 1).select(0, H - 1));
    const Tensor k = qkv.alias(heads(1).select(0, B - 1).select(0, H - 1).transpose(0, 1));
    expect_close(last, naive(q, k), 1e-6, 1e-6);
  }
}

double worst_error(const Tensor& y, const std::vector<double>& expected) {
  double worst = 0.0;
  const auto actual = y.to_vector<double>();
  for (std::size_t i = 0; i < actual.size(); ++i)
    worst = std::max(worst, std::abs(actual[i] - expected[i]));
  return worst;
}

TEST_F(CublasLt, MatmulComputesF32InTf32WhereItIsAllowed) {
  const Tensor a = random_tensor({9, 64}, DType::f32, kGpu, 1);
  const Tensor b = random_tensor({64, 7}, DType::f32, kGpu, 2);
  const Tensor y = Tensor::empty({9, 7}, DType::f32, kGpu);
  for (const bool allowed : {false, true, false}) {
    kernels::allow_tf32(allowed);
    kernels::matmul(a.view(), b.view(), y.view());
    const double error = worst_error(y, naive(a, b));
    EXPECT_EQ(error > 1e-4, allowed) << error;
    EXPECT_LT(error, 2e-2);
  }
}

class TimedCublasLt : public CublasLt {
 protected:
  static constexpr std::int64_t kSize = 104;  // cubed, just enough to be timed
  /// A number of columns for each test: no two are of one class.
  static constexpr std::int64_t kColumns[] = {105, 113, 121, 129, 145, 162, 177};

  const test::TimedChoices timed_;

  static std::uint64_t calls_of(const Tensor& a, const Tensor& b, const Tensor& y,
                                const kernels::MatmulOptions& options = {}) {
    const CallCount products("cublasLtMatmul");
    kernels::matmul(a.view(), b.view(), y.view(), options);
    return products();
  }
  static Tensor matrix(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
    return random_tensor({rows, columns}, DType::f32, kGpu, seed);
  }
};

TEST_F(TimedCublasLt, CandidatesAreTimedOnceAShape) {
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[0], 2);
  const Tensor y = matrix(kSize, kColumns[0], 3);
  const auto waits = [] { return gpusim::counters().waits["cudaEventSynchronize in matmul"]; };
  const auto waits_before = waits();
  EXPECT_EQ(calls_of(a, b, y), 4 * 3 + 1u);  // four rounds of three proposals, and the product
  EXPECT_EQ(waits(), waits_before + 1);
  expect_close(y, naive(a, b), 1e-5, 1e-5);
  EXPECT_EQ(calls_of(a, b, y), 1u);
  const Tensor small = matrix(8, 8, 1), result = matrix(8, 8, 2);
  EXPECT_EQ(calls_of(small, small, result), 1u);
}

/// The simulated library's last proposal, which takes most workspace.
TEST_F(TimedCublasLt, TheFastestOfTheProposalsIsChosen) {
  const core::Stream stream = core::Stream::create(kGpu);
  const core::StreamGuard on(stream);
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[6], 2);
  const Tensor y = matrix(kSize, kColumns[6], 3);
  calls_of(a, b, y);
  cudaEvent_t marks[2];
  for (cudaEvent_t& mark : marks) must(cudaEventCreateWithFlags(&mark, cudaEventDefault));
  must(cudaEventRecord(marks[0], static_cast<cudaStream_t>(stream.native())));
  calls_of(a, b, y);
  must(cudaEventRecord(marks[1], static_cast<cudaStream_t>(stream.native())));
  must(cudaEventSynchronize(marks[1]));
  float milliseconds = 0;
  must(cudaEventElapsedTime(&milliseconds, marks[0], marks[1]));
  EXPECT_LT(milliseconds, 0.4f);  // the others take a whole one and a half
  for (const cudaEvent_t mark : marks) must(cudaEventDestroy(mark));
}

/// Lengths that change from step to step.
TEST_F(TimedCublasLt, ShapesOfOneClassAreTimedOnce) {
  const Tensor b = matrix(kSize, kSize, 2);
  std::uint64_t products = 0;
  for (std::int64_t rows = 513; rows <= 576; rows += 7) {
    const Tensor a = matrix(rows, kSize, 1), y = matrix(rows, kSize, 3);
    products += calls_of(a, b, y);
    expect_close(y, naive(a, b), 1e-5, 1e-5);
  }
  EXPECT_EQ(products, 10 + 12u);
}

TEST_F(TimedCublasLt, ASumIsAddedToOnce) {
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[1], 2);
  const Tensor y = Tensor::full({kSize, kColumns[1]}, 3.0, DType::f32, kGpu);
  EXPECT_GT(calls_of(a, b, y, {.accumulate = true}), 10u);
  auto expected = naive(a, b);
  for (double& value : expected) value += 3.0;
  expect_close(y, expected, 1e-5, 1e-5);
}

TEST_F(TimedCublasLt, ChoicesComeBackWithASavedState) {
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[2], 2);
  const Tensor y = matrix(kSize, kColumns[2], 3);
  calls_of(a, b, y);
  const std::string saved = kernels::product_choices();
  EXPECT_THAT(saved, HasSubstr("cublaslt_products"));
  EXPECT_THAT(saved, HasSubstr("1 x 104 128 104 a f32 align 16"));
  kernels::use_product_choices(saved);
  const CallCount checks("cublasLtMatmulAlgoCheck");
  EXPECT_EQ(calls_of(a, b, y), 1u);
  EXPECT_EQ(checks(), 1u);
  expect_close(y, naive(a, b), 1e-5, 1e-5);
}

TEST_F(TimedCublasLt, AnAlgorithmOfAnotherVersionGivesWayToAProposal) {
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[3], 2);
  const Tensor y = matrix(kSize, kColumns[3], 3);
  calls_of(a, b, y);
  const std::string saved = kernels::product_choices();
  gpusim::inject("cublasLtMatmulAlgoCheck", 1, CUBLAS_STATUS_NOT_SUPPORTED);
  kernels::use_product_choices(saved);
  const CallCount checks("cublasLtMatmulAlgoCheck");
  EXPECT_EQ(calls_of(a, b, y), 1u);
  EXPECT_EQ(checks(), 1u);
  expect_close(y, naive(a, b), 1e-5, 1e-5);
}

TEST_F(TimedCublasLt, CandidatesThatRefuseLoseTheTiming) {
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[4], 2);
  const Tensor y = matrix(kSize, kColumns[4], 3);
  gpusim::inject("cublasLtMatmul", 2, CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(calls_of(a, b, y), 4 * 3 + 1 - 3u);  // it is not asked again
  expect_close(y, naive(a, b), 1e-5, 1e-5);
}

TEST_F(TimedCublasLt, NothingIsTimedWithinACapture) {
  (void)calls_of(matrix(16, 16, 4), matrix(16, 16, 5), matrix(16, 16, 6));  // makes the handle
  const Tensor a = matrix(kSize, kSize, 1), b = matrix(kSize, kColumns[5], 2);
  const Tensor y = matrix(kSize, kColumns[5], 3);
  const core::Stream stream = core::Stream::create(kGpu);
  const core::StreamGuard on(stream);
  const auto handle = static_cast<cudaStream_t>(stream.native());
  must(cudaDeviceSynchronize());
  must(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(calls_of(a, b, y), 1u);
  cudaGraph_t graph = nullptr;
  must(cudaStreamEndCapture(handle, &graph));
  must(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace cairn::test
