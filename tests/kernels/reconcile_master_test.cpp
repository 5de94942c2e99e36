// Masters that follow what somebody wrote into the half weights beside them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "cairn/kernels/elementwise.h"
#include "support/message_of.h"
#include "update_cases.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::Values;

using Bits = std::vector<std::uint32_t>;

class ReconcileMaster : public testing::TestWithParam<Device> {};

Tensor of_bits(const Bits& bits, Device device) {
  std::vector<float> values;
  for (std::uint32_t b : bits) values.push_back(std::bit_cast<float>(b));
  return Tensor::from(values, {std::ssize(values)}, DType::f32, device);
}

Bits bits_of(const Tensor& x) {
  Bits bits;
  for (float v : x.to_vector<float>()) bits.push_back(std::bit_cast<std::uint32_t>(v));
  return bits;
}

// Floats around every fifth upper half: subnormals, ties, overflows of f16, infinities, a NaN.
Bits telling_bits() {
  Bits all{0x7fc00000u, 0xffc00000u};
  for (std::uint32_t high = 0; high < 0x10000; high += 5) {
    for (std::uint32_t low : {0u, 1u, 0x1000u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const std::uint32_t bits = high << 16 | low;
      if ((bits & 0x7fffffffu) <= 0x7f800000u) all.push_back(bits);
    }
  }
  return all;
}

/// A dtype's values next to one of them.
double next_above(double value, DType dtype) {
  const double step = std::max(std::abs(value), dtype == DType::f16 ? 0x1p-14 : 0x1p-126);
  return value + step * 2 * test::epsilon(dtype);
}

TEST_P(ReconcileMaster, MastersOfUntouchedWeightsKeepTheirBits) {
  const Bits bits = telling_bits();
  for (DType dtype : {DType::f16, DType::bf16}) {
    const Tensor master = of_bits(bits, GetParam());
    const Tensor weight = Tensor::empty(master.shape(), dtype, GetParam());
    copy(master, weight);
    reconcile_master(weight, master);
    EXPECT_EQ(bits_of(master), bits) << core::name(dtype);
  }
}

TEST_P(ReconcileMaster, WrittenWeightsReplaceTheirMastersAlone) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (DType dtype : {DType::f16, DType::bf16}) {
    for (std::int64_t n : {1, 7, 64, 513, 70001}) {
      Values truth = test::random_values(n, 3);
      for (double& x : truth) x = static_cast<float>(x);
      Values half = test::rounded(truth, dtype), expected = truth;
      for (std::size_t i = 0; i < truth.size(); i += 5) {
        half[i] = next_above(half[i], dtype);
        expected[i] = half[i];
      }
      if (n > 600) {
        half[510] = expected[510] = inf;
        half[511] = expected[511] = -65504;
      }
      half = test::rounded(half, dtype);
      for (std::size_t i = 0; i < truth.size(); ++i) {
        if (expected[i] != truth[i]) expected[i] = half[i];
      }
      const Tensor master = Tensor::from(truth, {n}, DType::f32, GetParam());
      const Tensor weight = Tensor::from(half, {n}, dtype, GetParam());
      reconcile_master(weight, master);
      EXPECT_EQ(master.to_vector<double>(), expected) << core::name(dtype) << " x " << n;
      EXPECT_EQ(weight.to_vector<double>(), half);
    }
  }
}

TEST_P(ReconcileMaster, ComparesBitsOfNanAndOfZeros) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (DType dtype : {DType::f16, DType::bf16}) {
    const Tensor master = Tensor::from(std::vector<float>{1.0f, nan, 0.0f, -0.0f, nan, 1e-30f}, {6},
                                       DType::f32, GetParam());
    const Tensor weight = Tensor::from(std::vector<float>{nan, 2.0f, -0.0f, -0.0f, nan, 0.5f}, {6},
                                       dtype, GetParam());
    reconcile_master(weight, master);
    const auto after = master.to_vector<float>();
    EXPECT_TRUE(std::isnan(after[0]));
    EXPECT_EQ(after[1], 2.0f);
    EXPECT_TRUE(after[2] == 0.0f && std::signbit(after[2]));
    EXPECT_TRUE(after[3] == 0.0f && std::signbit(after[3]));
    EXPECT_TRUE(std::isnan(after[4]));
    EXPECT_EQ(after[5], 0.5f);
  }
}

TEST_P(ReconcileMaster, LeavesWhatAnUpdateWroteAlone) {
  const std::int64_t n = 1001;
  for (DType dtype : {DType::f16, DType::bf16}) {
    const auto made = [&](DType kind, std::uint64_t seed) {
      return test::random_tensor({n}, kind, GetParam(), seed, 0.0, 1.0);
    };
    const Tensor weight = made(dtype, 1), master = made(DType::f32, 2);
    update({{made(dtype, 3), weight, master, made(DType::f32, 4), made(DType::f32, 5)}},
           AdamOptions{.lr = 0.01});
    const Bits before = bits_of(master);
    reconcile_master(weight, master);
    EXPECT_EQ(bits_of(master), before) << core::name(dtype);
  }
}

TEST_P(ReconcileMaster, TakesAnyDenseLayoutAndAddress) {
  const Tensor master = test::random_channels_last({2, 3, 5, 7}, DType::f32, GetParam(), 1);
  const Tensor weight =
      test::random_channels_last({2, 3, 5, 7}, DType::bf16, GetParam(), 2, 2.0, 3.0);
  const Values written = weight.to_vector<double>();
  reconcile_master(weight, master);
  EXPECT_EQ(master.to_vector<double>(), written);

  const test::Placed half(test::rounded(test::random_values(77, 4, 2.0, 4.0), DType::bf16),
                          DType::bf16, GetParam(), 3);
  const test::Placed whole(test::random_values(77, 5), DType::f32, GetParam(), 1);
  reconcile_master(half.view(), whole.view());
  EXPECT_EQ(whole.values(), half.values());
  EXPECT_TRUE(whole.surroundings_untouched());
  reconcile_master(Tensor::empty({0}, DType::f16, GetParam()),
                   Tensor::empty({0}, DType::f32, GetParam()));
}

TEST_P(ReconcileMaster, ErrorsSayWhatIsWrong) {
  const auto zeros = [&](const Shape& shape, DType dtype) {
    return Tensor::zeros(shape, dtype, GetParam());
  };
  const Tensor f32 = zeros({4}, DType::f32), bf16 = zeros({4}, DType::bf16);
  EXPECT_EQ(message_of([&] { reconcile_master(f32, f32); }),
            "[reconcile_master] expected weight of dtype f16 or bf16, got f32");
  EXPECT_EQ(message_of([&] { reconcile_master(bf16, bf16); }),
            "[reconcile_master] expected master of dtype f32, got bf16");
  EXPECT_EQ(message_of([&] { reconcile_master(bf16, zeros({5}, DType::f32)); }),
            "[reconcile_master] expected master of shape [4] and strides [1] like the weight, got "
            "[5] and [1]");
  EXPECT_EQ(message_of([&] { reconcile_master(zeros({8}, DType::f16).view().slice(0, 0, 0), {}); }),
            "[reconcile_master] expected a defined master, got an undefined view");
}

INSTANTIATE_TEST_SUITE_P(Devices, ReconcileMaster, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
