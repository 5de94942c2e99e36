// What the simulator's tests write their programs with.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/sim/simulator.h"

#define OK(call) ASSERT_EQ(call, cudaSuccess)
#define MUST(call) \
  if ((call) != cudaSuccess) throw std::runtime_error(#call)

namespace cairn::test {

inline constexpr int kCount = 64;
inline constexpr std::size_t kBytes = kCount * sizeof(float);

inline float* device_floats(int count = kCount) {
  void* data = nullptr;
  MUST(cudaMalloc(&data, static_cast<std::size_t>(count) * sizeof(float)));
  return static_cast<float*>(data);
}

inline cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  MUST(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

inline cudaEvent_t recorded(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  MUST(cudaEventRecord(event, stream));
  return event;
}

inline std::vector<float> values_of(const float* data, cudaStream_t stream, int count = kCount) {
  std::vector<float> values(static_cast<std::size_t>(count));
  MUST(cudaMemcpyAsync(values.data(), data, values.size() * sizeof(float), cudaMemcpyDeviceToHost,
                       stream));
  MUST(cudaStreamSynchronize(stream));
  return values;
}

/// In each schedule.
class Simulator : public testing::TestWithParam<gpusim::Schedule> {
 protected:
  Simulator() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    gpusim::set_schedule(GetParam(), 7);
    MUST(cudaSetDevice(0));
  }
};

inline std::string schedule_name(const testing::TestParamInfo<gpusim::Schedule>& info) {
  static const char* const names[] = {"late", "early", "shuffled"};
  return names[static_cast<int>(info.param)];
}
inline constexpr gpusim::Schedule kSchedules[] = {gpusim::Schedule::late, gpusim::Schedule::early,
                                                  gpusim::Schedule::shuffled};

}  // namespace cairn::test
