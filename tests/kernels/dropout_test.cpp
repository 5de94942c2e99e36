#include <gtest/gtest.h>

#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;

class Dropout : public testing::TestWithParam<Device> {};

std::vector<double> reference(const std::vector<double>& x, double p, std::uint64_t seed,
                              std::uint64_t offset) {
  std::vector<double> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float u = core::uniform_from_bits(core::philox(seed, offset, i / 4)[i % 4]);
    y[i] = static_cast<double>(u) >= p ? x[i] / (1.0 - p) : 0.0;
  }
  return y;
}

TEST_P(Dropout, KeepsWhatTheCounterSaysInEveryDtypeAndLayout) {
  constexpr std::uint64_t kSeed = 0x123456789abcdef0, kOffset = 0xfedcba9876543210;
  for (const Shape& shape :
       {Shape{}, Shape{0}, Shape{3}, Shape{5, 77}, Shape{2, 5, 6, 7}, Shape{70001}}) {
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        for (double p : {0.0, 0.1, 0.75}) {
          SCOPED_TRACE(describe(shape, dtype, layout));
          const LaidOut x(random_values(shape.numel(), 1, 1, 2), shape, dtype, GetParam(), layout);
          const LaidOut y(shape, dtype, GetParam(), layout);
          dropout(x, p, kSeed, kOffset, y);
          expect_close(y.values(), reference(x.values(), p, kSeed, kOffset), 3 * epsilon(dtype), 0);
          EXPECT_TRUE(y.gaps_untouched());
        }
      }
    }
  }
}

TEST_P(Dropout, DropsTheShareAskedForAndReplays) {
  const Tensor x = Tensor::full({200000}, 1.0, DType::f32, GetParam()), y = Tensor::empty_like(x);
  dropout(x, 0.3, 7, 1, y);
  const auto first = y.to_vector();
  double kept = 0;
  for (double v : first) kept += v != 0.0;
  EXPECT_NEAR(kept / 200000, 0.7, 0.005);
  dropout(x, 0.3, 7, 2, y);
  EXPECT_NE(y.to_vector(), first);
  dropout(x, 0.3, 7, 1, x);  // in place
  EXPECT_EQ(x.to_vector(), first);
}

TEST_P(Dropout, OfEverythingGivesZeros) {
  const Tensor x = Tensor::full({100}, 5.0, DType::f32, GetParam());
  dropout(x, 1.0, 1, 1, x);
  EXPECT_EQ(x.to_vector(), std::vector<double>(100, 0.0));
}

TEST_P(Dropout, RejectsImpossibleProbabilities) {
  const Tensor x = Tensor::zeros({2}, DType::f32, GetParam());
  EXPECT_EQ(message_of([&] { dropout(x, 1.5, 1, 1, x); }),
            "[dropout] expected p in [0, 1], got 1.5");
}

INSTANTIATE_TEST_SUITE_P(Devices, Dropout, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
