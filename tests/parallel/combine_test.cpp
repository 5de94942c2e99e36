// The ranks' contributions combined on the host: rounding of halves, NaN.
#include "collectives/cpu/combine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/core/tensor.h"

namespace cairn::parallel {
namespace {

TEST(Combine, ConvertsHalvesAsCoreDoes) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor all = Tensor::empty({65536}, dtype), zeros = Tensor::zeros({65536}, dtype),
                 out = Tensor::empty({65536}, dtype);
    auto* bits = static_cast<std::uint16_t*>(all.raw_data());
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    combine(ReduceOp::sum, dtype, {all.raw_data(), zeros.raw_data()}, out.raw_data(), 65536);
    combine(ReduceOp::max, dtype, {all.raw_data(), all.raw_data()}, zeros.raw_data(), 65536);
    const auto before = all.to_vector<float>(), sum = out.to_vector<float>(),
               max = zeros.to_vector<float>();
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (std::isnan(before[i])) {
        EXPECT_TRUE(std::isnan(sum[i]) && std::isnan(max[i])) << i;
      } else {
        EXPECT_EQ(sum[i], before[i]) << i;
        EXPECT_EQ(max[i], before[i]) << i;
      }
    }
  }
}

TEST(Combine, RoundsHalvesOnceAndToEven) {
  std::vector<float> a, b;
  for (int i = 0; i < 20'000; ++i) {
    a.push_back(static_cast<float>(std::ldexp(std::sin(i * 0.1), i % 50 - 30)));
    b.push_back(static_cast<float>(std::ldexp(std::cos(i * 0.3), i % 41 - 25)));
  }
  a.insert(a.end(), {65504.0f, 65504.0f, 2048.0f, 0x1p-24f, 1.0f});
  b.insert(b.end(), {15.9f, 65504.0f, 1.0f, 0x1p-25f, 0x1p-11f});
  const auto n = static_cast<std::int64_t>(a.size());
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor x = Tensor::from(a, {n}, dtype), y = Tensor::from(b, {n}, dtype);
    auto sum = x.to_vector<float>();
    const auto other = y.to_vector<float>();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    combine(ReduceOp::sum, dtype, {x.raw_data(), y.raw_data()}, x.raw_data(), a.size());
    EXPECT_EQ(x.to_vector<float>(), Tensor::from(sum, {n}, dtype).to_vector<float>()) << dtype;
  }
}

TEST(Combine, PassesNanOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::max, ReduceOp::min, ReduceOp::sum, ReduceOp::mean}) {
    const std::vector<float> a = {nan, 1, 1}, b = {1, nan, 1};
    std::vector<float> out(3);
    combine(op, DType::f32, {a.data(), b.data()}, out.data(), 3);
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]) && !std::isnan(out[2])) << name(op);
  }
}

}  // namespace
}  // namespace cairn::parallel
