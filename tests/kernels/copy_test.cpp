#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::rounded;

constexpr DType kAll[] = {DType::f16, DType::bf16, DType::f32, DType::f64,    DType::i16,
                          DType::i32, DType::i64,  DType::u8,  DType::boolean};

class Copy : public testing::TestWithParam<Device> {};

double converted(double x, DType dtype) {
  if (dtype == DType::boolean) return x != 0.0 ? 1.0 : 0.0;
  return core::is_floating(dtype) ? x : std::trunc(x);
}

TEST_P(Copy, ConvertsBetweenAllDtypesAndLayouts) {
  for (const Shape& shape : {Shape{}, Shape{0, 3}, Shape{9}, Shape{70, 133}, Shape{2, 9, 3, 10}}) {
    for (DType from : kAll) {
      for (DType to : kAll) {
        for (Layout layout : layouts(shape)) {
          SCOPED_TRACE(describe(shape, from, layout) + " to " + std::string(core::name(to)));
          const LaidOut x(random_values(shape.numel(), 1, 0, 100), shape, from, GetParam(), layout);
          for (Layout target : {Layout::row_major, layout}) {
            const LaidOut y(shape, to, GetParam(), target);
            copy(x, y);
            auto expected = x.values();
            for (double& v : expected) v = converted(v, to);
            EXPECT_EQ(y.values(), rounded(expected, to));
            EXPECT_TRUE(y.gaps_untouched());
          }
        }
      }
    }
  }
}

TEST_P(Copy, TransposesLargeViews) {
  const std::int64_t a = 131, b = 3, c = 200;
  const auto values = random_values(a * b * c, 2);
  const Tensor x = Tensor::from(values, {a, b, c}, DType::f32, GetParam());
  for (const Shape& order : {Shape{2, 1, 0}, Shape{1, 2, 0}, Shape{1, 0, 2}, Shape{0, 2, 1}}) {
    const TensorView view = x.view().permute(order);
    const Tensor y = Tensor::empty(view.shape, DType::f32, GetParam());
    copy(view, y);
    EXPECT_EQ(y.to_vector(), x.alias(view).to_vector()) << order;
    const Tensor half = Tensor::empty(view.shape, DType::bf16, GetParam());
    copy(view, half);
    EXPECT_EQ(half.to_vector(), rounded(x.alias(view).to_vector(), DType::bf16)) << order;
  }
}

/// Rows that are longer than a block's threads, and begin anywhere.
TEST_P(Copy, TakesLongRowsOfAnyDistance) {
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::f64}) {
    const Tensor x = Tensor::from(random_values(5 * 2605, 1, 0, 100), {5, 2605}, dtype, GetParam());
    const Tensor y = Tensor::full({5, 2608}, 7.0, dtype, GetParam());
    copy(x.view().slice(1, 1, 2602), y.view().slice(1, 2, 2603));
    const auto from = x.to_vector<double>();
    const auto to = y.to_vector<double>();
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::size_t row = i / 2608, column = i % 2608;
      const bool copied = column >= 2 && column < 2603;
      ASSERT_EQ(to[i], copied ? from[row * 2605 + column - 1] : 7.0) << core::name(dtype) << i;
    }
  }
}

TEST_P(Copy, BroadcastsItsInput) {
  const Tensor x = Tensor::from(std::vector<float>{1, 2, 3}, {3, 1}, DType::f32, GetParam());
  const Tensor y = Tensor::empty({2, 3, 2}, DType::f16, GetParam());
  copy(x, y);
  EXPECT_EQ(y.to_vector(), (std::vector<double>{1, 1, 2, 2, 3, 3, 1, 1, 2, 2, 3, 3}));
}

// Every 16-bit pattern to float and back, and floats around every rounding boundary, against the
// scalar conversions of core.
TEST_P(Copy, HalvesRoundToNearestEvenLikeTheScalarConversion) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    std::vector<double> patterns;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      core::Half half;
      core::BFloat16 brain;
      half.bits = brain.bits = static_cast<std::uint16_t>(bits);
      patterns.push_back(dtype == DType::f16 ? static_cast<float>(half)
                                             : static_cast<float>(brain));
    }
    const Shape shape{65536};
    const Tensor stored = Tensor::from(patterns, shape, dtype, GetParam());
    const Tensor wide = Tensor::empty(shape, DType::f32, GetParam());
    copy(stored, wide);
    test::expect_close(wide, patterns, 0, 0, "widened");

    std::vector<double> between;  // halfway to the next value, and one float either side of it
    for (std::size_t i = 0; i + 1 < 0x7c00; ++i) {
      const auto middle = static_cast<float>((patterns[i] + patterns[i + 1]) / 2);
      for (float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e38f)}) {
        between.push_back(v);
        between.push_back(-v);
      }
    }
    const Tensor fine =
        Tensor::from(between, {static_cast<std::int64_t>(between.size())}, DType::f32, GetParam());
    const Tensor coarse = Tensor::empty(fine.shape(), dtype, GetParam());
    copy(fine, coarse);
    test::expect_close(coarse, rounded(between, dtype), 0, 0, "rounded");
  }
}

TEST_P(Copy, FillSetsEveryDtypeAndLeavesGapsAlone) {
  for (DType dtype : kAll) {
    for (const Shape& shape : {Shape{}, Shape{0}, Shape{5, 9}, Shape{2, 3, 4, 5}}) {
      for (Layout layout : layouts(shape)) {
        const LaidOut y(shape, dtype, GetParam(), layout);
        fill(y, 3.0);
        const double expected = dtype == DType::boolean ? 1.0 : 3.0;
        EXPECT_EQ(y.values(),
                  std::vector<double>(static_cast<std::size_t>(shape.numel()), expected))
            << describe(shape, dtype, layout);
        EXPECT_TRUE(dtype == DType::boolean || y.gaps_untouched());
      }
    }
  }
}

TEST_P(Copy, FullHasItsValueThroughout) {
  for (DType dtype : kAll) {
    for (std::int64_t n : {0, 1, 4095, 4096, 4097, 30001}) {
      const std::vector<double> expected(static_cast<std::size_t>(n), converted(1.5, dtype));
      EXPECT_EQ(Tensor::full({n}, 1.5, dtype, GetParam()).to_vector(), expected) << dtype << n;
    }
  }
}

TEST_P(Copy, CrossesToTheHostAndBack) {
  const auto values = random_values(6 * 35, 5);
  for (Layout layout : {Layout::row_major, Layout::transposed, Layout::sliced}) {
    for (DType to : {DType::f32, DType::bf16}) {
      const LaidOut x(values, {6, 35}, DType::f32, Device{}, layout);
      const LaidOut there({6, 35}, to, GetParam(), Layout::sliced);
      const LaidOut back({6, 35}, DType::f32, Device{}, layout);
      copy(x, there);
      copy(there, back);
      EXPECT_EQ(back.values(), rounded(rounded(values, DType::f32), to));
      EXPECT_TRUE(there.gaps_untouched() && back.gaps_untouched());
    }
  }
}

TEST(CopyOnStreams, KeepsTheOrderOfAWorkerStream) {
  const Device cpu;
  const Tensor x = Tensor::zeros({100000}), y = Tensor::zeros({100000}, DType::bf16),
               z = Tensor::zeros({100000});
  const core::Stream stream = core::Stream::create(cpu);
  {
    const core::StreamGuard guard(stream);
    for (int i = 0; i < 5; ++i) {
      fill(x, i);
      copy(x, y);
      axpby(1.0, y, 1.0, z);
    }
  }
  stream.synchronize();
  EXPECT_EQ(z.to_vector(), std::vector<double>(100000, 10.0));
}

TEST_P(Copy, ErrorsNameBothShapes) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, GetParam());
  EXPECT_EQ(message_of([&] {
              copy(x, Tensor::zeros({3, 2}, DType::f32, GetParam()));
            }),
            "[copy] expected x of a shape that broadcasts to [3, 2], got [2, 3]");
}

INSTANTIATE_TEST_SUITE_P(Devices, Copy, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
