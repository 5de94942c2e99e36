// Norms of lists of tensors, as they are and divided by a loss scale: 192 configurations each, 24 a
// pair of sizes. torch.testing.assert_close: rtol 1.3e-6, atol 1e-5.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/lists.h"

namespace cairn::conformance {
namespace {

constexpr double kValue = 4.0;

void expect_norm(double actual, double expected) {
  EXPECT_NEAR(actual, expected, 1e-5 + 1.3e-6 * expected);
}

class ListNorms : public testing::TestWithParam<PairCase> {
 protected:
  static double norm_of(std::int64_t elements, double scale) {
    return kValue * scale * std::sqrt(static_cast<double>(elements));
  }

  static void run(const List& list, int repeat, bool per_tensor, double scale) {
    const std::int64_t a = GetParam().pair[0].numel(), b = GetParam().pair[1].numel();
    const kernels::Norms norms = kernels::multi_tensor_l2norm(list.views(), per_tensor, scale);
    expect_norm(norms.norm, norm_of(repeat * (a + b), scale));
    EXPECT_TRUE(norms.finite);
    ASSERT_EQ(norms.per_tensor.size(), per_tensor ? list.views().size() : 0u);
    for (std::size_t i = 0; i < norms.per_tensor.size(); ++i) {
      expect_norm(norms.per_tensor[i], norm_of(i % 2 == 0 ? a : b, scale));
    }
  }

  static void run_all(double scale) {
    for (std::int64_t offset : kOffsets) {
      for (int repeat : kRepeats) {
        for (DType dtype : kTypes) {
          const List list("x", GetParam(), repeat, dtype, offset);
          list.fill(kValue);
          for (bool per_tensor : {false, true}) {
            SCOPED_TRACE(core::str(dtype, ", repeat ", repeat, ", offset ", offset));
            run(list, repeat, per_tensor, scale);
          }
        }
      }
    }
  }
};

TEST_P(ListNorms, GivesTheNormOfAllAndOfEach) {
  run_all(1.0);
}

TEST_P(ListNorms, GivesTheNormsOfTheUnscaled) {
  run_all(0.5);
}

const auto kPairs = testing::ValuesIn(cases(std::begin(kFlatPairs), std::end(kFlatPairs)));
INSTANTIATE_TEST_SUITE_P(Sizes, ListNorms, kPairs, case_name);

}  // namespace
}  // namespace cairn::conformance
