// multi_tensor_scale, multi_tensor_axpby and multi_tensor_l2norm against double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/core/stream.h"
#include "cairn/kernels/multi_tensor.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using testing::HasSubstr;
using Views = std::vector<TensorView>;
using Values = std::vector<double>;

constexpr double kMultiTensorLinearInf = std::numeric_limits<double>::infinity();
constexpr DType kMultiTensorLinearDtypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr std::int64_t kMultiTensorLinearSizes[] = {7, 0, 1, 70001, 4096, 8193};
constexpr double kUntouched = 77.0;

struct List {
  std::vector<Tensor> tensors;
  Views views() const { return {tensors.begin(), tensors.end()}; }
  const Tensor& operator[](std::size_t i) const { return tensors[i]; }
};

class MultiTensorLinear : public testing::TestWithParam<Device> {
 protected:
  Tensor make(const Values& values, DType dtype) const {
    return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, dtype, GetParam());
  }
  List random_list(DType dtype, std::uint64_t seed) const {
    List list;
    for (std::int64_t n : kMultiTensorLinearSizes)
      list.tensors.push_back(make(random_values(n, seed++), dtype));
    return list;
  }
  List blank_list(DType dtype) const {
    List list;
    for (std::int64_t n : kMultiTensorLinearSizes) {
      list.tensors.push_back(Tensor::full({n}, kUntouched, dtype, GetParam()));
    }
    return list;
  }
  static Values linear(double a, const Values& x, double b, const Values& y) {
    Values out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) out[i] = a * x[i] + (y.empty() ? 0.0 : b * y[i]);
    return out;
  }
  static double sum_of_squares(const Values& values) {
    double sum = 0;
    for (double v : values) sum += std::isfinite(v) ? v * v : 0.0;
    return sum;
  }
};

double tolerance(DType dtype) {
  return 1.01 * test::epsilon(dtype) + 4 * test::epsilon(DType::f32);
}

TEST_P(MultiTensorLinear, ScalesBetweenAllTypes) {
  for (DType in : kMultiTensorLinearDtypes) {
    for (DType out : kMultiTensorLinearDtypes) {
      const List x = random_list(in, 1), y = blank_list(out);
      const auto checks = multi_tensor_scale(x.views(), y.views(), -0.3).read();
      for (std::size_t i = 0; i < std::size(kMultiTensorLinearSizes); ++i) {
        const Values values = x[i].to_vector();
        expect_close(y[i], linear(-0.3, values, 0, {}), tolerance(out), 1e-7);
        EXPECT_NEAR(checks[i].power_sum, sum_of_squares(values),
                    1e-10 * kMultiTensorLinearSizes[i]);
        EXPECT_EQ(checks[i].nonfinite, 0);
      }
    }
  }
}

TEST_P(MultiTensorLinear, AddsInAllTypes) {
  for (DType dx : kMultiTensorLinearDtypes) {
    for (DType dy : kMultiTensorLinearDtypes) {
      for (DType out : kMultiTensorLinearDtypes) {
        const List x = random_list(dx, 1), y = random_list(dy, 50), z = blank_list(out);
        const auto checks = multi_tensor_axpby(0.7, x.views(), -3.0, y.views(), z.views()).read();
        for (std::size_t i = 0; i < std::size(kMultiTensorLinearSizes); ++i) {
          const Values vx = x[i].to_vector(), vy = y[i].to_vector();
          expect_close(z[i], linear(0.7, vx, -3.0, vy), tolerance(out), 1e-6);
          EXPECT_NEAR(checks[i].power_sum, sum_of_squares(vx) + sum_of_squares(vy),
                      1e-10 * kMultiTensorLinearSizes[i]);
        }
      }
    }
  }
}

TEST_P(MultiTensorLinear, WorksInPlace) {
  for (DType dtype : kMultiTensorLinearDtypes) {
    const List x = random_list(dtype, 1), y = random_list(DType::f32, 50),
               z = random_list(dtype, 9);
    const List old_x = random_list(dtype, 1), old_y = random_list(DType::f32, 50),
               old_z = random_list(dtype, 9);
    multi_tensor_axpby(0.5, x.views(), 2.0, y.views(), y.views()).read();
    multi_tensor_axpby(0.5, x.views(), 2.0, z.views(), x.views()).read();
    multi_tensor_scale(z.views(), z.views(), 4.0).read();
    for (std::size_t i = 0; i < std::size(kMultiTensorLinearSizes); ++i) {
      const Values vx = old_x[i].to_vector(), vy = old_y[i].to_vector(), vz = old_z[i].to_vector();
      expect_close(y[i], linear(0.5, vx, 2.0, vy), tolerance(DType::f32), 1e-6);
      expect_close(x[i], linear(0.5, vx, 2.0, vz), tolerance(dtype), 1e-6);
      expect_close(z[i], linear(4.0, vz, 0, {}), tolerance(dtype), 1e-6);
    }
  }
}

TEST_P(MultiTensorLinear, TakesViewsAtEveryAlignmentAndLeavesTheirNeighbours) {
  const std::int64_t n = 1000;
  for (DType dtype : kMultiTensorLinearDtypes) {
    for (std::int64_t offset = 0; offset < 8; ++offset) {
      const std::int64_t count = n - 7 - offset, start = 7 - offset;
      const Tensor x = make(random_values(n, 1), dtype), y = make(random_values(n, 2), DType::f32);
      const Tensor out = Tensor::full({n}, kUntouched, dtype, GetParam());
      multi_tensor_axpby(2.0, {x.view().slice(0, offset, offset + count)}, 3.0,
                         {y.view().slice(0, offset, offset + count)},
                         {out.view().slice(0, start, start + count)})
          .read();
      const Values sums = linear(2.0, x.to_vector(), 3.0, y.to_vector());
      Values expected(static_cast<std::size_t>(n), kUntouched);
      std::copy_n(sums.begin() + offset, count, expected.begin() + start);
      expect_close(out, expected, tolerance(dtype), 1e-6, core::str("offset ", offset));
    }
  }
}

TEST_P(MultiTensorLinear, ChecksTheArgumentsNamedAndWritesAllTheSame) {
  const double nan = std::nan("");
  for (DType dtype : kMultiTensorLinearDtypes) {
    Values vx(5003, 0.5), vy(5003, 0.25);
    vx[4999] = kMultiTensorLinearInf, vx[5002] = nan;
    vy[0] = nan, vy[1] = -kMultiTensorLinearInf, vy[2] = nan;
    const Tensor x = make(vx, dtype), y = make(vy, dtype), z = make(vy, dtype);
    const Tensor fine = make(Values(64, 1.0), dtype);
    struct Case {
      CheckedArgument checked;
      std::int64_t nonfinite, nans;
      double sum;
    };
    const double of_x = 5001 * 0.25, of_y = 5000 * 0.0625;
    for (const Case& c :
         {Case{CheckedArgument::both, 5, 3, of_x + of_y}, Case{CheckedArgument::x, 2, 1, of_x},
          Case{CheckedArgument::y, 3, 2, of_y}}) {
      const auto checks =
          multi_tensor_axpby(1.0, {fine, x}, 2.0, {fine, y}, {fine, z}, c.checked).read();
      EXPECT_EQ(checks[0].nonfinite, 0);
      EXPECT_EQ(checks[1].nonfinite, c.nonfinite);
      EXPECT_EQ(checks[1].nan, c.nans);
      EXPECT_EQ(checks[1].power_sum, c.sum);
      expect_close(z, linear(1.0, vx, 2.0, vy), 0, 0);
    }
    const auto checks = multi_tensor_scale({x, fine}, {x, fine}, 0.5).read();  // in place
    EXPECT_EQ(checks[0].nonfinite, 2);
    EXPECT_EQ(checks[0].nan, 1);
    expect_close(x, linear(0.5, vx, 0, {}), 0, 0);
  }
}

TEST_P(MultiTensorLinear, AnOverflowOfTheResultIsNotOneOfTheInput) {
  const Tensor x = Tensor::full({10}, 60000.0, DType::f16, GetParam());
  EXPECT_EQ(multi_tensor_scale({x}, {x}, 2.0).read()[0].nonfinite, 0);
  EXPECT_EQ(x.to_vector(), Values(10, kMultiTensorLinearInf));
}

TEST_P(MultiTensorLinear, TakesChannelsLastImagesAmongThemselves) {
  const Shape shape{3, 5, 7, 2};
  const Values vx = random_values(shape.numel(), 1), vy = random_values(shape.numel(), 2);
  const LaidOut x(vx, shape, DType::f16, GetParam(), Layout::channels_last);
  const LaidOut y(vy, shape, DType::f32, GetParam(), Layout::channels_last);
  const LaidOut z(shape, DType::f32, GetParam(), Layout::channels_last);
  multi_tensor_axpby(2.0, {x}, 8.0, {y}, {z}).read();
  expect_close(z.values(), linear(2.0, x.values(), 8.0, y.values()), 1e-6, 1e-6);

  const Tensor rows = Tensor::zeros(shape, DType::f32, GetParam());
  EXPECT_THAT(message_of([&] { (void)multi_tensor_scale({x}, {rows}, 1.0); }),
              AllOf(HasSubstr("[multi_tensor_scale] expected out 0 with strides"),
                    HasSubstr("like in 0"), HasSubstr("copy one into the other's layout")));
}

TEST_P(MultiTensorLinear, NormsAreOfTheScaledValues) {
  const List x = random_list(DType::bf16, 1);
  const Norms norms = multi_tensor_l2norm(x.views(), true, 0.25),
              plain = multi_tensor_l2norm(x.views());
  double total = 0;
  Values each;
  for (const Tensor& tensor : x.tensors) {
    const double sum = sum_of_squares(tensor.to_vector());
    each.push_back(0.25 * std::sqrt(sum));
    total += sum;
  }
  EXPECT_NEAR(norms.norm, 0.25 * std::sqrt(total), 1e-9);
  EXPECT_NEAR(plain.norm, std::sqrt(total), 1e-9);
  expect_close(norms.per_tensor, each, 1e-10, 0);
  EXPECT_TRUE(plain.per_tensor.empty());
  EXPECT_TRUE(norms.finite);
}

TEST_P(MultiTensorLinear, NormsOfTheNonFiniteAreNotFinite) {
  const Tensor fine = make({3, 4}, DType::f32), inf = make({1, -kMultiTensorLinearInf}, DType::f16),
               nan = make({std::nan(""), kMultiTensorLinearInf}, DType::bf16);
  const Norms with_inf = multi_tensor_l2norm({fine, inf}, true);
  EXPECT_FALSE(with_inf.finite);
  EXPECT_EQ(with_inf.norm, kMultiTensorLinearInf);
  EXPECT_EQ(with_inf.per_tensor, (Values{5.0, kMultiTensorLinearInf}));
  const Norms with_nan = multi_tensor_l2norm({inf, nan, fine}, true);
  EXPECT_TRUE(std::isnan(with_nan.norm));
  EXPECT_TRUE(std::isnan(with_nan.per_tensor[1]));
  EXPECT_EQ(with_nan.per_tensor[2], 5.0);
}

TEST_P(MultiTensorLinear, EmptyListsAreFine) {
  EXPECT_TRUE(multi_tensor_scale({}, {}, 1.0).read().empty());
  EXPECT_TRUE(multi_tensor_axpby(1.0, {}, 1.0, {}, {}).read().empty());
  EXPECT_EQ(multi_tensor_l2norm({}, true).norm, 0.0);
}

TEST_P(MultiTensorLinear, ErrorsNameTheTensor) {
  const Tensor x = make({1, 2, 3}, DType::f32), half = make({1, 2, 3}, DType::f16);
  const Tensor longer = make({1, 2, 3, 4}, DType::f32);
  const Tensor f64 = Tensor::zeros({3}, DType::f64, GetParam());
  EXPECT_EQ(message_of([&] {
              (void)multi_tensor_scale({x, x}, {x}, 1.0);
            }),
            "[multi_tensor_scale] expected as many tensors in out as in in, 2, got 1");
  EXPECT_EQ(message_of([&] {
              (void)multi_tensor_axpby(1, {x, x}, 1, {x}, {x, x});
            }),
            "[multi_tensor_axpby] expected as many tensors in y as in x, 2, got 1");
  EXPECT_EQ(message_of([&] {
              (void)multi_tensor_axpby(1, {x, x}, 1, {half, longer}, {x, x});
            }),
            "[multi_tensor_axpby] expected y 1 of shape [3] like x 1, got [4]");
  EXPECT_EQ(message_of([&] {
              (void)multi_tensor_scale({x, x}, {half, f64}, 1.0);
            }),
            "[multi_tensor_scale] expected out 1 of dtype f16, bf16 or f32, got f64");
  const TensorView gaps = Tensor::zeros({3, 2}, DType::f32, GetParam()).view().select(1, 0);
  EXPECT_THAT(message_of([&] {
                (void)multi_tensor_scale({x, gaps}, {x, gaps}, 1.0);
              }),
              HasSubstr("expected a dense in 1"));
  const TensorView as_half(x.raw_data(), {3}, DType::f16, GetParam());
  EXPECT_THAT(message_of([&] { (void)multi_tensor_scale({x}, {as_half}, 1.0); }),
              HasSubstr("which shares the memory of in 0, of its dtype f32, got f16"));
}

INSTANTIATE_TEST_SUITE_P(Devices, MultiTensorLinear, testing::ValuesIn(test::devices()),
                         test::device_name);

TEST(MultiTensorLinearOnDevices, ListsAreOfOneDevice) {
  const Device other{core::DeviceType::cpu, 1};  // check_tensors_test.cpp asks for two
  const Tensor here = Tensor::zeros({3}), there = Tensor::zeros({3}, DType::f32, other);
  EXPECT_EQ(message_of([&] { (void)multi_tensor_scale({here}, {there}, 1.0); }),
            "[multi_tensor_scale] expected out 0 on cpu:0, the device of in 0, got cpu:1");
  EXPECT_EQ(message_of([&] {
              (void)multi_tensor_axpby(1, {here, there}, 1, {here, here}, {here, here});
            }),
            "[multi_tensor_axpby] expected every x on cpu:0, the device of the first, got x 1 on "
            "cpu:1");
  EXPECT_EQ(multi_tensor_scale({there}, {there}, 1.0).read().size(), 1u);
}

TEST(MultiTensorLinearOnStreams, RunsInOrder) {
  const core::Stream stream = core::Stream::create(Device{});
  const Tensor x = Tensor::full({100000}, 2.0), y = Tensor::full({100000}, 1.0);
  PendingCheck check;
  {
    const core::StreamGuard guard(stream);
    for (int i = 0; i < 3; ++i) check = multi_tensor_axpby(1.0, {x}, 2.0, {y}, {y});
  }
  EXPECT_EQ(check.read()[0].power_sum, 100000 * (4.0 + 100.0));  // y was 10
  stream.synchronize();
  EXPECT_EQ(y.to_vector()[99999], 22.0);
}

}  // namespace
}  // namespace cairn::kernels
