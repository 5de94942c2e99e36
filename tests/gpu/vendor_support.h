// What the tests of the simulated vendor libraries share: GPUs, device memory with typed values.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/sim/elements.h"
#include "gpu/sim/simulator.h"

namespace cairn::test {

// Before the first call: the simulator reads it once.
inline const bool kTwoGpus = setenv("CAIRN_SIM_GPUS", "2", 0) == 0;

inline void must(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

/// Memory of the current device that holds numbers of one type, `offset` bytes into its allocation.
class DeviceValues {
 public:
  DeviceValues(gpusim::Element element, std::size_t count, std::size_t offset = 0)
      : element_(element), count_(count), offset_(offset) {
    must(cudaMalloc(&memory_, bytes() + offset));
  }
  DeviceValues(gpusim::Element element, const std::vector<double>& values, std::size_t offset = 0)
      : DeviceValues(element, values.size(), offset) {
    set(values);
  }
  ~DeviceValues() { cudaFree(memory_); }
  DeviceValues(const DeviceValues&) = delete;
  DeviceValues& operator=(const DeviceValues&) = delete;

  void set(const std::vector<double>& values) {
    std::vector<char> stored(bytes());
    for (std::size_t i = 0; i < count_; ++i)
      gpusim::store(element_, &stored[i * gpusim::size_of(element_)], values[i]);
    must(cudaMemcpy(data(), stored.data(), bytes(), cudaMemcpyHostToDevice));
  }
  void* data() const { return static_cast<char*>(memory_) + offset_; }
  std::size_t bytes() const { return count_ * gpusim::size_of(element_); }
  std::vector<double> values() const {
    must(cudaDeviceSynchronize());
    std::vector<char> stored(bytes());
    must(cudaMemcpy(stored.data(), data(), bytes(), cudaMemcpyDeviceToHost));
    std::vector<double> values(count_);
    for (std::size_t i = 0; i < count_; ++i)
      values[i] = gpusim::load(element_, &stored[i * gpusim::size_of(element_)]);
    return values;
  }

 private:
  gpusim::Element element_;
  std::size_t count_, offset_;
  void* memory_ = nullptr;
};

/// The values as the type holds them.
inline std::vector<double> rounded(gpusim::Element element, std::vector<double> values) {
  char stored[8];
  for (double& value : values) {
    gpusim::store(element, stored, value);
    value = gpusim::load(element, stored);
  }
  return values;
}

/// A test of a library's calls on the first GPU; the faults that it injects end with it.
class VendorTest : public testing::Test {
 protected:
  VendorTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    must(cudaSetDevice(0));
  }
  ~VendorTest() override { gpusim::clear_injected(); }
};
class CublasLt : public VendorTest {};
class Cudnn : public VendorTest {};

/// How often a call was made meanwhile.
class CallCount {
 public:
  explicit CallCount(std::string call) : call_(std::move(call)), before_(now()) {}
  std::uint64_t operator()() const { return now() - before_; }

 private:
  std::uint64_t now() const {
    const auto calls = gpusim::counters().calls;
    const auto found = calls.find(call_);
    return found == calls.end() ? 0 : found->second;
  }
  std::string call_;
  std::uint64_t before_;
};

}  // namespace cairn::test
