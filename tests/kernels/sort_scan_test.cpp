#include "cairn/kernels/sort_scan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class AlongRows : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, AlongRows, testing::ValuesIn(test::devices()), test::device_name);

TEST_P(AlongRows, TopkEqualsAStableSort) {
  const Shape shape{7, 300};
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i32, DType::u8}) {
    for (Layout layout : layouts(shape)) {
      const LaidOut x(test::random_values(shape.numel(), 1, 0, 40), shape, dtype, GetParam(),
                      layout);
      const std::vector<double> values = x.values();  // u8 and i32 have many equals
      for (const bool largest : {true, false}) {
        for (const std::int64_t k : {1, 5, dtype == DType::f64 ? 300 : 9}) {
          const Tensor index = Tensor::empty({7, k}, DType::i64, GetParam());
          topk(x, index, largest);
          std::vector<double> expected;
          for (std::int64_t row = 0; row < 7; ++row) {
            std::vector<std::int64_t> order(300);
            std::iota(order.begin(), order.end(), 0);
            const auto at = [&](std::int64_t i) {
              return values[static_cast<std::size_t>(row * 300 + i)];
            };
            std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
              return largest ? at(a) > at(b) : at(a) < at(b);
            });
            expected.insert(expected.end(), order.begin(), order.begin() + k);
          }
          EXPECT_EQ(index.to_vector<double>(), expected) << core::name(dtype) << " " << k;
        }
      }
    }
  }
}

TEST_P(AlongRows, TopkTakesNanForTheLargest) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const Tensor x = Tensor::from<float>({1, nan, inf, nan, -inf}, {1, 5}, DType::f32, GetParam());
  const Tensor index = Tensor::empty({1, 5}, DType::i64, GetParam());
  topk(x, index);
  EXPECT_THAT(index.to_vector(), ElementsAre(1, 3, 2, 0, 4));
  topk(x, index, false);
  EXPECT_THAT(index.to_vector(), ElementsAre(4, 0, 2, 1, 3));
}

TEST_P(AlongRows, CumsumEqualsReference) {
  for (const std::int64_t length : {1, 31, 256, 1000}) {
    const Shape shape{5, length};
    for (DType dtype : kFloating) {
      for (Layout layout : layouts(shape)) {
        const LaidOut x(test::random_values(shape.numel(), 1), shape, dtype, GetParam(), layout);
        const LaidOut y(shape, dtype, GetParam(), layout);
        const std::vector<double> values = x.values();
        for (const bool reverse : {false, true}) {
          std::vector<double> expected(values.size());
          for (std::int64_t row = 0; row < 5; ++row) {
            double sum = 0.0;
            for (std::int64_t i = 0; i < length; ++i) {
              const auto at =
                  static_cast<std::size_t>(row * length + (reverse ? length - 1 - i : i));
              expected[at] = sum += values[at];
            }
          }
          cumsum(x, y, reverse);
          test::expect_close(y.values(), expected, 1.01 * epsilon(dtype),
                             dtype == DType::f64 ? 1e-12 : 2e-5);
          EXPECT_TRUE(y.gaps_untouched());
        }
      }
    }
  }
}

TEST(RowsInOrder, NamesWhatDoesNotFit) {
  const Tensor x = Tensor::zeros({2, 3});
  EXPECT_THAT(test::message_of([&] {
                topk(x, Tensor::zeros({2, 4}, DType::i64));
              }),
              HasSubstr("K <= V"));
  EXPECT_THAT(test::message_of([&] { topk(x, Tensor::zeros({2, 1})); }), HasSubstr("i64"));
  EXPECT_THAT(test::message_of([&] { cumsum(x, Tensor::zeros({3, 2})); }), HasSubstr("[cumsum]"));
}

}  // namespace
}  // namespace cairn::kernels
