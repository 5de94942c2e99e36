// Masters kept as a bf16 weight and a 16-bit remainder.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "cairn/kernels/copy.h"
#include "support/message_of.h"
#include "update_cases.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::random_values;
using test::Values;

class Remainders : public testing::TestWithParam<Device> {};

Tensor remainder_of_bits(const std::vector<std::uint32_t>& bits, Device device) {
  std::vector<float> values;
  for (std::uint32_t b : bits) values.push_back(std::bit_cast<float>(b));
  return Tensor::from(values, {std::ssize(values)}, DType::f32, device);
}

std::vector<std::uint32_t> remainder_bits_of(const Tensor& x) {
  std::vector<std::uint32_t> bits;
  for (float v : x.to_vector<float>()) bits.push_back(std::bit_cast<std::uint32_t>(v));
  return bits;
}

// Every upper half with lower halves around the tie, the ends and at random: all finite exponents,
// subnormals, zeros and infinities of both signs.
std::vector<std::uint32_t> remainder_telling_bits() {
  std::vector<std::uint32_t> all;
  std::uint32_t random = 12345;
  for (std::uint32_t high = 0; high < 0x10000; high += 3) {
    random = random * 1664525u + 1013904223u;
    for (std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, random >> 16}) {
      const std::uint32_t bits = high << 16 | low;
      if ((bits & 0x7fffffffu) <= 0x7f800000u) all.push_back(bits);
    }
  }
  return all;
}

TEST_P(Remainders, SplitAndJoinAreExactForEveryKindOfFloat) {
  const auto bits = remainder_telling_bits();
  const Tensor x = remainder_of_bits(bits, GetParam());
  const Shape shape = x.shape();
  const Tensor weight = Tensor::empty(shape, DType::bf16, GetParam());
  const Tensor remainder = Tensor::empty(shape, DType::i16, GetParam());
  const Tensor back = Tensor::empty(shape, DType::f32, GetParam());
  split_master(x, weight, remainder);
  join_master(weight, remainder, back);
  EXPECT_EQ(remainder_bits_of(back), bits);

  const Values rounded = weight.to_vector<double>();
  const Values even = test::rounded(x.to_vector<double>(), DType::bf16);
  std::size_t ties = 0;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const bool tie = (bits[i] & 0xffffu) == 0x8000u;
    const bool away = (bits[i] & 0x10000u) == 0;  // where even lies towards zero
    ties += tie && away;
    EXPECT_EQ(rounded[i] == even[i], !(tie && away)) << std::hex << bits[i];
  }
  EXPECT_GT(ties, 1000u);
}

TEST_P(Remainders, NanStaysNan) {
  const Tensor x = remainder_of_bits(
      {0x7fc00000u, 0x7fffffffu, 0xffc00000u, 0x7f800001u, 0xffffffffu}, GetParam());
  const Tensor weight = Tensor::empty({5}, DType::bf16, GetParam());
  const Tensor remainder = Tensor::empty({5}, DType::i16, GetParam());
  const Tensor back = Tensor::empty({5}, DType::f32, GetParam());
  split_master(x, weight, remainder);
  join_master(weight, remainder, back);
  for (double v : weight.to_vector<double>()) EXPECT_TRUE(std::isnan(v));
  for (double v : back.to_vector<double>()) EXPECT_TRUE(std::isnan(v));
}

TEST_P(Remainders, AThousandStepsHaveTheBitsOfF32Masters) {
  const std::int64_t n = 203;
  const Tensor start = Tensor::from(random_values(n, 1), {n}, DType::f32, GetParam());
  struct Run {
    Tensor weight, master, m, v;
  };
  const auto zeros = [&](DType dtype) { return Tensor::zeros({n}, dtype, GetParam()); };
  const Run plain{zeros(DType::bf16),
                  Tensor::from(random_values(n, 1), {n}, DType::f32, GetParam()),
                  zeros(DType::bf16), zeros(DType::bf16)};
  const Run split{zeros(DType::bf16), zeros(DType::i16), zeros(DType::bf16), zeros(DType::bf16)};
  split_master(start, split.weight, split.master);
  const Tensor joined = zeros(DType::f32);
  for (int step = 1; step <= 1000; ++step) {
    const Tensor g = Tensor::from(random_values(n, static_cast<std::uint64_t>(step)), {n},
                                  DType::bf16, GetParam());
    const AdamOptions options{.lr = 1e-3,
                              .weight_decay = 0.01,
                              .correction1 = 1 - std::pow(0.9, step),
                              .correction2 = 1 - std::pow(0.999, step),
                              .gradient_scale = 1.0 / 3};
    for (const Run& run : {plain, split}) {
      update({{g, run.weight, run.master, run.m, run.v}}, options);
    }
    join_master(split.weight, split.master, joined);
    const auto bits = remainder_bits_of(plain.master);
    ASSERT_EQ(remainder_bits_of(joined), bits) << "step " << step;
    const Values a = plain.weight.to_vector<double>(), b = split.weight.to_vector<double>();
    for (std::size_t i = 0; i < a.size(); ++i) {
      const bool tie = (bits[i] & 0xffffu) == 0x8000u;
      ASSERT_TRUE(tie || a[i] == b[i]) << "step " << step;
    }
  }
}

TEST_P(Remainders, OfChangedWeightsAreForgottenAndOthersKeepTheirs) {
  for (const std::int64_t n : {0, 1, 7, 513, 70001}) {
    const Tensor weight = test::random_tensor({n}, DType::bf16, GetParam(), 1);
    const Tensor former = Tensor::empty({n}, DType::bf16, GetParam());
    copy(weight, former);
    Values low(static_cast<std::size_t>(n)), expected = low;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      expected[at] = low[at] = static_cast<double>(i * 7919 % 65536 - 32768);
      if (i % 97 != 3) continue;
      fill(weight.view().slice(0, i, i + 1), 5.0);  // random ones lie in [-1, 1)
      expected[at] = 0;
    }
    const Tensor remainder = Tensor::from(low, {n}, DType::i16, GetParam());
    const Values written = weight.to_vector<double>();
    reconcile_remainder(weight, former, remainder);
    EXPECT_EQ(remainder.to_vector<double>(), expected) << n;
    EXPECT_EQ(weight.to_vector<double>(), written);
  }
}

TEST_P(Remainders, AreForgottenByTheBitsOfZerosAndNan) {
  const auto make = [&](const Values& values) {
    return Tensor::from(values, {4}, DType::bf16, GetParam());
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor remainder = Tensor::from(Values{9, 9, 9, 9}, {4}, DType::i16, GetParam());
  reconcile_remainder(make({-0.0, 0.0, nan, 1.0}), make({0.0, 0.0, nan, nan}), remainder);
  EXPECT_EQ(remainder.to_vector<double>(), (Values{0, 9, 9, 0}));
}

TEST_P(Remainders, ErrorsSayWhatIsWrong) {
  const Tensor f32 = Tensor::zeros({4}, DType::f32, GetParam()),
               bf16 = Tensor::zeros({4}, DType::bf16, GetParam()),
               i16 = Tensor::zeros({4}, DType::i16, GetParam());
  EXPECT_EQ(message_of([&] { join_master(f32, i16, f32); }),
            "[join_master] expected weight of dtype bf16, got f32");
  EXPECT_EQ(message_of([&] { split_master(f32, bf16, bf16); }),
            "[split_master] expected remainder of dtype i16, got bf16");
  EXPECT_EQ(
      message_of([&] { split_master(f32, bf16, Tensor::zeros({5}, DType::i16, GetParam())); }),
      "[split_master] expected remainder of shape [4] and strides [1] like the weight, got "
      "[5] and [1]");
  EXPECT_EQ(message_of([&] { reconcile_remainder(bf16, f32, i16); }),
            "[reconcile_remainder] expected former of dtype bf16, got f32");
  EXPECT_EQ(message_of([&] { reconcile_remainder(bf16, bf16, bf16); }),
            "[reconcile_remainder] expected remainder of dtype i16, got bf16");
}

INSTANTIATE_TEST_SUITE_P(Devices, Remainders, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
