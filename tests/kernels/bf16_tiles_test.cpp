// Every way to multiply bf16 tiles that this processor has, against sums in double.
#include "cpu/bf16_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "layouts.h"

namespace cairn::kernels {
namespace {

using core::BFloat16;

std::vector<BFloat16> drawn(std::int64_t count, std::uint64_t seed) {
  std::vector<BFloat16> values;
  for (const double x : test::random_values(count, seed, -1, 1)) {
    values.emplace_back(static_cast<float>(x));
  }
  return values;
}

/// b [k, n] as words of two rows, rows of ldb words.
std::vector<std::uint32_t> paired(const std::vector<BFloat16>& b, std::int64_t k, std::int64_t n,
                                  std::int64_t ldb) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(k / 2 * ldb));
  for (std::int64_t i = 0; i < k; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, &b[static_cast<std::size_t>(i * n + j)], 2);
      words[static_cast<std::size_t>(i / 2 * ldb + j)] |= std::uint32_t{bits} << (i % 2 * 16);
    }
  }
  return words;
}

void expect_product(const cpu::Bf16Tiles& tiles, std::int64_t m, std::int64_t n, std::int64_t k,
                    bool accumulate) {
  SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << " accumulate " << accumulate);
  const std::int64_t lda = k + 32, ldb = n + 16, ldy = n + 16;
  const auto a = drawn(m * lda, 1), b = drawn(k * n, 2);
  const auto words = paired(b, k, n, ldb);
  std::vector<float> y(static_cast<std::size_t>(m * ldy), 0.5f);
  tiles.begin();
  tiles.run({m, n, k, a.data(), lda, words.data(), ldb, y.data(), ldy, accumulate});
  tiles.end();
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < ldy; ++j) {
      double expected = j < n && !accumulate ? 0.0 : 0.5;
      for (std::int64_t l = 0; l < k && j < n; ++l) {
        expected +=
            static_cast<double>(static_cast<float>(a[static_cast<std::size_t>(i * lda + l)])) *
            static_cast<double>(static_cast<float>(b[static_cast<std::size_t>(l * n + j)]));
      }
      ASSERT_NEAR(y[static_cast<std::size_t>(i * ldy + j)], expected, 1e-5) << i << ", " << j;
    }
  }
}

TEST(Bf16Tiles, MultiplyAsSumsInDoubleDo) {
  for (const cpu::Bf16Tiles* const tiles : cpu::all_bf16_tiles()) {
    for (const bool accumulate : {false, true}) {
      expect_product(*tiles, 32, 32, 32, accumulate);
      expect_product(*tiles, 64, 32, 96, accumulate);
      expect_product(*tiles, 96, 64, 64, accumulate);
    }
  }
}

TEST(Bf16Tiles, TheChosenOnesAreThisProcessors) {
  const auto all = cpu::all_bf16_tiles();
  const cpu::Bf16Tiles* const chosen = cpu::bf16_tiles();
  EXPECT_TRUE(chosen == nullptr || std::find(all.begin(), all.end(), chosen) != all.end());
}

}  // namespace
}  // namespace cairn::kernels
