// Products of tiles by a warp (cuda/device/tile.cuh) against sums in double.
#include "cuda/device/tile.cuh"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace cairn::kernels::cuda {
namespace {

/// y = (a b^T) c: a is 16 M x D, b is N x D, c is N x D.
template <class T, int M, int N, int D>
__global__ void products_kernel(const T* a, const T* b, const T* c, float* scores, float* y) {
  constexpr int kStride = tile_stride<T, D>;
  SIMT_DYNAMIC_SHARED(T, tiles);
  T *const rows = tiles, *const columns = rows + 16 * M * kStride;
  T* const values = columns + N * kStride;
  for (int i = lane_index(); i < 16 * M * D; i += 32) rows[i / D * kStride + i % D] = a[i];
  for (int i = lane_index(); i < N * D; i += 32) {
    columns[i / D * kStride + i % D] = b[i];
    values[i / D * kStride + i % D] = c[i];
  }
  __syncwarp();
  Sums<M, N> product = {};
  add_product_transposed<D>(product, rows, columns);
  Sums<M, D> out = {};
  add_product(out, product, values);
  product.each([&](float& x, int m, int j, int i) {
    scores[Sums<M, N>::row(m, i) * N + Sums<M, N>::column(j, i)] = x;
  });
  out.each([&](float& x, int m, int j, int i) {
    y[Sums<M, D>::row(m, i) * D + Sums<M, D>::column(j, i)] = x;
  });
}

template <class T, int M, int N, int D>
void expect_products() {
  constexpr std::size_t kRows = 16 * M, kN = N, kD = D;
  std::mt19937 random(N + D);
  // Small whole numbers: products and their sums are exact in every type.
  const auto drawn = [&](std::size_t n) {
    std::vector<T> values(n);
    for (T& x : values) x = narrow<T>(static_cast<float>(static_cast<int>(random() % 3) - 1));
    return values;
  };
  const std::vector<T> a = drawn(kRows * kD), b = drawn(kN * kD), c = drawn(kN * kD);
  std::vector<float> scores(kRows * kN), y(kRows * kD);
  const std::size_t bytes = sizeof(T) * (kRows + 2 * kN) * std::size_t{tile_stride<T, D>};
  simt::launch({1, 32, bytes}, products_kernel<T, M, N, D>, a.data(), b.data(), c.data(),
               scores.data(), y.data());
  for (std::size_t row = 0; row < kRows; ++row) {
    std::vector<float> expected(kD);
    for (std::size_t n = 0; n < kN; ++n) {
      float score = 0;
      for (std::size_t d = 0; d < kD; ++d) score += widen(a[row * kD + d]) * widen(b[n * kD + d]);
      ASSERT_EQ(scores[row * kN + n], score) << row << ", " << n;
      for (std::size_t d = 0; d < kD; ++d) expected[d] += score * widen(c[n * kD + d]);
    }
    for (std::size_t d = 0; d < kD; ++d)
      ASSERT_EQ(y[row * kD + d], expected[d]) << row << ", " << d;
  }
}

template <class T>
class Tiles : public testing::Test {};
using Types = testing::Types<Half, BFloat16, float>;
TYPED_TEST_SUITE(Tiles, Types);

TYPED_TEST(Tiles, ProductsAreThoseOfTheirElements) {
  expect_products<TypeParam, 1, 16, 32>();
  expect_products<TypeParam, 2, 32, 64>();
  expect_products<TypeParam, 2, 64, 32>();
  expect_products<TypeParam, 1, 32, 128>();
}

}  // namespace
}  // namespace cairn::kernels::cuda
