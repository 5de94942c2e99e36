// What kernel tests share: the devices to run on, tensors with reproducible values, and comparison
// with a double-precision reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cairn/core/device.h"
#include "cairn/core/generator.h"
#include "cairn/core/tensor.h"

namespace cairn::test {

/// cpu:0 always, cuda:0 where there is one.
inline std::vector<Device> devices() {
  std::vector<Device> all{{core::DeviceType::cpu, 0}};
  if (core::cuda_available()) all.push_back({core::DeviceType::cuda, 0});
  return all;
}

/// In builds for the GPUs of tests/gpu/sim.
bool gpus_are_simulated();

/// Those that work fast enough for millions of elements: simulated GPUs do not.
inline std::vector<Device> fast_devices() {
  if (gpus_are_simulated()) return {{core::DeviceType::cpu, 0}};
  return devices();
}

/// Test names of a suite parameterised over devices: "cpu", "cuda".
inline std::string device_name(const testing::TestParamInfo<Device>& info) {
  return info.param.is_cuda() ? "cuda" : "cpu";
}

/// Values in [low, high), the same for the same seed everywhere.
inline std::vector<double> random_values(std::int64_t count, std::uint64_t seed, double low = -1.0,
                                         double high = 1.0) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float unit = core::uniform_from_bits(core::philox(seed, 0, i)[0]);
    values[i] = low + (high - low) * static_cast<double>(unit);
  }
  return values;
}

inline Tensor random_tensor(const Shape& shape, DType dtype, Device device, std::uint64_t seed,
                            double low = -1.0, double high = 1.0) {
  return Tensor::from(random_values(shape.numel(), seed, low, high), shape, dtype, device);
}

/// Standard normal f32 values of a generator of its own, on the default device.
inline Tensor normal_tensor(const Shape& shape, std::uint64_t seed) {
  const Tensor host = Tensor::empty(shape, DType::f32, Device{});
  core::Generator(seed).fill_normal(host, 0, 1);
  const Tensor x = Tensor::empty(shape);
  core::copy_bytes(host.view(), x.view());
  return x;
}

/// N C H W in shape, N H W C in memory.
inline Tensor random_channels_last(const Shape& shape, DType dtype, Device device,
                                   std::uint64_t seed, double low = -1.0, double high = 1.0) {
  const Shape stored{shape[0], shape[2], shape[3], shape[1]};
  const Tensor tensor = random_tensor(stored, dtype, device, seed, low, high);
  return tensor.alias(tensor.view().permute({0, 3, 1, 2}));
}

/// One rounding of the dtype, relative.
inline double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
    case DType::f32:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

/// Every |actual - expected| <= absolute + relative |expected|; equal infinities and NaN match.
/// Says how many fail and the worst.
inline void expect_close(const std::vector<double>& actual, const std::vector<double>& expected,
                         double relative, double absolute, const std::string& what = "") {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  std::size_t failures = 0, worst = 0;
  double worst_excess = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected[i] || (std::isnan(actual[i]) && std::isnan(expected[i]))) continue;
    const double excess =
        std::abs(actual[i] - expected[i]) / (absolute + relative * std::abs(expected[i]));
    if (excess <= 1.0) continue;
    ++failures;
    if (!(excess <= worst_excess)) worst = i, worst_excess = excess;
  }
  EXPECT_EQ(failures, 0u) << what << ": " << failures << " of " << actual.size()
                          << " differ; worst at " << worst << ": got " << actual[worst]
                          << ", expected " << expected[worst];
}

inline void expect_close(const Tensor& actual, const std::vector<double>& expected, double relative,
                         double absolute, const std::string& what = "") {
  expect_close(actual.to_vector<double>(), expected, relative, absolute, what);
}

}  // namespace cairn::test
