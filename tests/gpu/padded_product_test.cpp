// Products whose rows are misaligned, piece by piece in memory where they are not.
#include "cuda/cublaslt/padded_product.h"

#include <gtest/gtest.h>

#include <random>

#include "backend.h"
#include "cairn/kernels/copy.h"
#include "gpu/vendor_support.h"
#include "support/search.h"
#include "support/tensors.h"

namespace cairn::kernels::cuda {
namespace {

using test::random_tensor;

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr Padding kSmall{
    .least_multiplications = 0, .least_uses = 1, .piece_bytes = 512, .piece_unit = 8};

bool has_aligned_rows(const TensorView& x) {
  const std::int64_t down = x.strides[1] == 1 ? x.strides[0] : x.strides[1];
  return x.dtype == DType::f32 ||
         (down % 8 == 0 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0);
}

/// A matrix that lies row by row, or column by column.
Tensor matrix(std::int64_t rows, std::int64_t columns, bool by_columns, DType dtype,
              std::uint64_t seed) {
  if (!by_columns) return random_tensor({rows, columns}, dtype, kGpu, seed);
  const Tensor x = random_tensor({columns, rows}, dtype, kGpu, seed);
  return x.alias(x.view().transpose(0, 1));
}

struct Case {
  std::int64_t m, n, k;
  bool a_by_columns = false, b_by_columns = false;
  MatmulOptions options = {};
  DType y = DType::bf16;
};

/// How many pieces there were of whole units in n and k, which have the rows that tensor cores
/// want. The others are a few columns. All together are the plain product.
int pieces_of(const Case& c, bool padded = true) {
  const Tensor a = matrix(c.m, c.k, c.a_by_columns, DType::bf16, 1);
  const Tensor b = matrix(c.k, c.n, c.b_by_columns, DType::bf16, 2);
  const Tensor y = random_tensor({c.m, c.n}, c.y, kGpu, 3);
  const Tensor expected = random_tensor({c.m, c.n}, c.y, kGpu, 3);
  const Queue queue("matmul", kGpu);
  int pieces = 0;
  const auto multiply = [&](const TensorView& a_part, const TensorView& b_part,
                            const TensorView& y_part, const MatmulOptions& options) {
    matmul(a_part, b_part, y_part, options);
    EXPECT_EQ(a_part.size(1) % 8, 0);
    if (y_part.size(1) < 8) return;
    EXPECT_EQ(y_part.size(1) % 8, 0);
    for (const TensorView* x : {&a_part, &b_part, &y_part}) EXPECT_TRUE(has_aligned_rows(*x));
    ++pieces;
  };
  EXPECT_EQ(multiply_padded(backend(kGpu), queue, a, b, y, c.options, multiply, kSmall), padded);
  if (!padded) return 0;
  matmul(a, b, expected, c.options);
  test::expect_close(y, expected.to_vector<double>(), 0, 0, "padded");
  return pieces;
}

TEST(PaddedProduct, HasTheBitsOfThePlainOneInAsManyPiecesAsFit) {
  EXPECT_EQ(pieces_of({20, 17, 16, false, true}), 3) << "rows of y: 34 bytes each";
  EXPECT_EQ(pieces_of({20, 16, 17}), 3) << "rows of a";
  EXPECT_EQ(pieces_of({20, 17, 17, false, true}), 3) << "rows of all";
  EXPECT_EQ(pieces_of({16, 24, 17, true, true}), 2) << "columns of b along k";
  EXPECT_EQ(pieces_of({17, 16, 32, true}), 3) << "columns of a: 64 bytes each, the last alone";
  EXPECT_EQ(pieces_of({16, 17, 32}), 2) << "columns of b and y: 96 bytes each";
  EXPECT_EQ(pieces_of({17, 17, 16, true}, false), 0) << "columns of a and of b";
}

TEST(PaddedProduct, TakesWhatOtherProductsTake) {
  const Tensor bias = random_tensor({17}, DType::bf16, kGpu, 4);
  const Tensor before = Tensor::empty({20, 17}, DType::bf16, kGpu);
  const auto pieces = [](std::int64_t m, std::int64_t k, const MatmulOptions& options) {
    return pieces_of({m, 17, k, false, false, options});
  };
  EXPECT_EQ(pieces(20, 16, {.accumulate = true}), 2);
  EXPECT_EQ(pieces(20, 16, {.alpha = 0.5, .bias = bias}), 2);
  EXPECT_EQ(pieces(16, 32, {.bias = bias}), 2);
  EXPECT_EQ(
      pieces(20, 16, {.bias = bias, .activation = Activation::relu, .pre_activation = before}), 2);
  EXPECT_EQ(pieces_of({20, 17, 16, false, true, {.accumulate = true}}), 3) << "rows of y alone";
  EXPECT_EQ(pieces_of({20, 17, 16, false, true, {.bias = bias}}), 3);
  EXPECT_EQ(pieces_of({17, 16, 32, true, false, {.accumulate = true}, DType::f32}), 3);
}

/// Sizes, orders and options as they come.
TEST(PaddedProduct, HasTheBitsOfThePlainOneInDrawnForms) {
  std::mt19937_64 draw(test::search_seed());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(draw() % n); };
  int padded = 0;
  for (int i = 0; i < 300; ++i) {
    Case c{1 + below(40), 1 + below(40), 1 + below(40), below(2) == 0, below(2) == 0};
    if (below(3) == 0) c.y = DType::f32;
    c.options.accumulate = below(3) == 0;
    const Tensor bias = random_tensor({c.n}, c.y, kGpu, 4);
    if (!c.options.accumulate && below(2) == 0) c.options.bias = bias;
    const Tensor a = matrix(c.m, c.k, c.a_by_columns, DType::bf16, draw());
    const Tensor b = matrix(c.k, c.n, c.b_by_columns, DType::bf16, draw());
    const Tensor y = random_tensor({c.m, c.n}, c.y, kGpu, 3);
    const Tensor expected = random_tensor({c.m, c.n}, c.y, kGpu, 3);
    const auto plain = [](const TensorView& a_part, const TensorView& b_part,
                          const TensorView& y_part, const MatmulOptions& options) {
      matmul(a_part, b_part, y_part, options);
    };
    const Queue queue("matmul", kGpu);
    if (!multiply_padded(backend(kGpu), queue, a, b, y, c.options, plain, kSmall)) continue;
    ++padded;
    matmul(a, b, expected, c.options);
    ASSERT_EQ(y.to_vector<double>(), expected.to_vector<double>())
        << c.m << " x " << c.n << " x " << c.k << " columns of a " << c.a_by_columns << ", of b "
        << c.b_by_columns << " accumulate " << c.options.accumulate << ", i " << i;
  }
  EXPECT_GT(padded, 100);
}

/// As large as a product must be to gain: 8 columns at a time and the last one alone.
TEST(PaddedProduct, IsWhatMatmulMakesOfLargeOnes) {
  const Tensor a = matrix(512, 512, false, DType::bf16, 1);
  const Tensor b = matrix(512, 1025, true, DType::bf16, 2);
  const Tensor y = Tensor::empty({512, 1025}, DType::bf16, kGpu);
  const Tensor expected = Tensor::empty({512, 1025}, DType::bf16, kGpu);
  const test::CallCount products("cublasLtMatmul");
  matmul(a, b, y);
  EXPECT_EQ(products(), 2u);
  for (const std::int64_t begin : {0, 256}) {  // too small to gain
    const auto rows = [&](const Tensor& x) { return x.view().slice(0, begin, begin + 256); };
    matmul(rows(a), b, rows(expected));
  }
  EXPECT_EQ(products(), 4u);
  EXPECT_EQ(y.to_vector<double>(), expected.to_vector<double>());
}

TEST(PaddedProduct, LeavesAlignedRowsAndSmallProductsAlone) {
  EXPECT_EQ(pieces_of({16, 24, 32}, false), 0);
  EXPECT_EQ(pieces_of({1, 16, 17}, false), 0) << "one row is aligned";
  const Tensor a = matrix(16, 16, false, DType::bf16, 1), b = matrix(16, 17, false, DType::bf16, 2);
  const Tensor y = Tensor::empty({16, 17}, DType::bf16, kGpu);
  const Queue queue("matmul", kGpu);
  EXPECT_FALSE(multiply_padded(backend(kGpu), queue, a, b, y, {}, {}));
}

}  // namespace
}  // namespace cairn::kernels::cuda
