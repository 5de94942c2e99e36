// Programs with planted faults, which the simulator must name, and their clean twins, of which it
// must say nothing.
#include "gpu/sim/simulator.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "gpu/planted_kernels.h"
#include "gpu/programs.h"

namespace cairn::test {
namespace {

using gpusim::Schedule;

using SimulatorDeathTest = Simulator;
INSTANTIATE_TEST_SUITE_P(Schedules, Simulator, testing::ValuesIn(kSchedules), schedule_name);
INSTANTIATE_TEST_SUITE_P(Schedules, SimulatorDeathTest, testing::ValuesIn(kSchedules),
                         schedule_name);

TEST_P(Simulator, RunsWorkOfAStreamInOrder) {
  const cudaStream_t stream = new_stream();
  float* const x = device_floats();
  float* const y = device_floats();
  launch_fill(stream, x, kCount, 1.0f);
  launch_fill(stream, y, kCount, 2.0f);
  launch_add(stream, x, y, kCount);
  launch_add(stream, x, y, kCount);
  EXPECT_EQ(values_of(y, stream), std::vector<float>(kCount, 4.0f));
  OK(cudaGetLastError());
}

TEST_P(Simulator, OrdersStreamsByEvents) {
  const cudaStream_t one = new_stream(), other = new_stream();
  float* const x = device_floats();
  float* const y = device_floats();
  launch_fill(one, x, kCount, 3.0f);
  OK(cudaStreamWaitEvent(other, recorded(one), 0));
  launch_fill(other, y, kCount, 1.0f);
  launch_add(other, x, y, kCount);
  EXPECT_EQ(values_of(y, other), std::vector<float>(kCount, 4.0f));
  OK(cudaStreamWaitEvent(one, recorded(other), 0));
  launch_fill(one, x, kCount, 5.0f);  // after the other stream has read it
  EXPECT_EQ(values_of(x, one), std::vector<float>(kCount, 5.0f));
}

TEST_P(Simulator, OrdersStreamsByTheHostsWaits) {
  const cudaStream_t one = new_stream(), other = new_stream();
  float* const x = device_floats();
  launch_fill(one, x, kCount, 3.0f);
  OK(cudaStreamSynchronize(one));
  launch_fill(other, x, kCount, 4.0f);
  EXPECT_EQ(values_of(x, other), std::vector<float>(kCount, 4.0f));
}

TEST(Late, WorkDoesNotRunBeforeSomebodyWaits) {
  gpusim::set_schedule(Schedule::late, 1);
  const cudaStream_t stream = new_stream();
  float* const x = device_floats();
  launch_fill(stream, x, kCount, 3.0f);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  OK(cudaStreamSynchronize(stream));
  OK(cudaStreamQuery(stream));
}

TEST(Late, WhatNobodyWaitsForRunsByItself) {
  gpusim::set_schedule(Schedule::late, 1);
  const cudaStream_t stream = new_stream();
  launch_fill(stream, device_floats(), kCount, 3.0f);
  for (int i = 0; i < 2000 && cudaStreamQuery(stream) == cudaErrorNotReady; ++i) {
    struct timespec pause {
      0, 1'000'000
    };
    nanosleep(&pause, nullptr);
  }
  OK(cudaStreamQuery(stream));
  (void)cudaGetLastError();  // that it was not ready
}

TEST_P(Simulator, FreshMemoryIsPoison) {
  for (float value : values_of(device_floats(), new_stream())) EXPECT_TRUE(std::isnan(value));
}

TEST_P(SimulatorDeathTest, RaceBetweenStreams) {
  const cudaStream_t one = new_stream(), other = new_stream();
  float* const x = device_floats();
  launch_fill(one, x, kCount, 3.0f);
  EXPECT_DEATH(
      {
        launch_fill(other, x, kCount, 4.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: race: 'kernel' writes what 'kernel' wrote and nothing orders the two");
}

TEST_P(SimulatorDeathTest, RaceWithACopyAcrossAFreedBlocksReuse) {
  const cudaStream_t one = new_stream(), other = new_stream();
  float* const x = device_floats(1024);
  launch_fill(one, x + 512, 64, 3.0f);
  EXPECT_DEATH(
      {
        const std::vector<float> values(1024);
        cudaMemcpyAsync(x, values.data(), 4096, cudaMemcpyHostToDevice, other);
        cudaDeviceSynchronize();
      },
      "gpusim: race: .*2048 bytes into 4096 of cuda:0");
}

TEST_P(Simulator, NeighboursInOnePageDoNotRace) {
  const cudaStream_t one = new_stream(), other = new_stream();
  float* const x = device_floats();
  launch_fill(one, x, 32, 3.0f);
  launch_fill(other, x + 32, 32, 4.0f);
  OK(cudaDeviceSynchronize());
}

TEST_P(SimulatorDeathTest, HostDereference) {
  float* const x = device_floats();
  EXPECT_DEATH(*x = 1.0f, "gpusim: host access: host code touches .* 0 bytes into 256 of cuda:0");
  EXPECT_DEATH(std::exit(static_cast<int>(*x)), "gpusim: host access");
}

TEST_P(SimulatorDeathTest, KernelReadsHostMemory) {
  std::vector<float> host(kCount);
  float* const y = device_floats();
  const auto add = [&](const float* x) {
    launch_fill(nullptr, y, kCount, 1.0f);
    launch_add(nullptr, x, y, kCount);
    cudaDeviceSynchronize();
  };
  EXPECT_DEATH(add(host.data()), "gpusim: host memory: a kernel reads 4 bytes");
  void* pinned = nullptr;
  OK(cudaHostAlloc(&pinned, kBytes, cudaHostAllocPortable));
  std::fill_n(static_cast<float*>(pinned), kCount, 2.0f);
  add(static_cast<float*>(pinned));
  EXPECT_EQ(values_of(y, nullptr), std::vector<float>(kCount, 3.0f));
}

TEST_P(SimulatorDeathTest, OverrunOfAnAllocation) {
  float* const x = device_floats();
  EXPECT_DEATH(
      {
        launch_fill(nullptr, x, kCount + 1, 1.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: memory: a write of 4 bytes at .*outside the allocation; running 'kernel'");
}

TEST_P(SimulatorDeathTest, UseAfterFree) {
  float* const x = device_floats();
  OK(cudaFree(x));
  EXPECT_DEATH(
      {
        launch_fill(nullptr, x, kCount, 1.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: memory: .*not allocated");
  EXPECT_DEATH(cudaFree(x), "gpusim: memory: cudaFree of .*not allocated");
}

TEST_P(SimulatorDeathTest, UndefinedValues) {
  float* const x = device_floats();
  EXPECT_DEATH(
      {
        launch_add(nullptr, x, x, kCount);
        cudaDeviceSynchronize();
      },
      "gpusim: undefined value: a read of 4 bytes");
}

TEST_P(SimulatorDeathTest, MisalignedPack) {
  float* const x = device_floats();
  float* const y = device_floats();
  launch_fill(nullptr, x, kCount, 1.0f);
  launch_copy_16_bytes(nullptr, x + 4, y + 8);
  OK(cudaDeviceSynchronize());
  EXPECT_DEATH(
      {
        launch_copy_16_bytes(nullptr, x + 1, y);
        cudaDeviceSynchronize();
      },
      "gpusim: kernel: misaligned: an access of 16 bytes");
}

TEST_P(SimulatorDeathTest, UndefinedBehaviourOfKernels) {
  float* const y = device_floats();
  launch_fill(nullptr, y, kCount, 1.0f);
  launch_shift(nullptr, y, 30);
  launch_local_array(nullptr, y, 3);
  launch_sum_of_integers(nullptr, y, 2147483646, 1);
  OK(cudaDeviceSynchronize());
  const auto dies = [](const auto& launch, const char* message) {
    EXPECT_DEATH(
        {
          launch();
          cudaDeviceSynchronize();
        },
        message);
  };
  dies([&] { launch_shift(nullptr, y, 32); }, "gpusim: undefined behaviour: .*shifts by");
  dies([&] { launch_local_array(nullptr, y, 4); }, "planted_kernels.cu:.* takes an element");
  dies([&] { launch_sum_of_integers(nullptr, y, 2147483647, 1); },
       "planted_kernels.cu:.* adds signed integers");
}

TEST_P(SimulatorDeathTest, SharedMemoryOverrunAndDivergentBarrier) {
  float* const y = device_floats();
  EXPECT_DEATH(
      {
        launch_shared_overrun(nullptr, y);
        cudaDeviceSynchronize();
      },
      "gpusim: host memory: a kernel reads 4 bytes");
  EXPECT_DEATH(
      {
        launch_divergent_barrier(nullptr);
        cudaDeviceSynchronize();
      },
      "gpusim: kernel: .*divergent barrier");
}

TEST_P(SimulatorDeathTest, WrongDevice) {
  OK(cudaSetDevice(1));
  float* const theirs = device_floats();
  const cudaStream_t their_stream = new_stream();
  OK(cudaSetDevice(0));
  EXPECT_DEATH(launch_fill(their_stream, theirs, kCount, 1.0f),
               "gpusim: wrong device: a kernel is launched on a stream of cuda:1 while cuda:0");
  EXPECT_DEATH(
      {
        launch_fill(nullptr, theirs, kCount, 1.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: wrong device: a write .*work of cuda:0 has no peer access");
  if (cudaDeviceEnablePeerAccess(1, 0) != cudaSuccess) {  // the process may have it already
    EXPECT_EQ(cudaGetLastError(), cudaErrorPeerAccessAlreadyEnabled);
  }
  launch_fill(nullptr, theirs, kCount, 1.0f);
  OK(cudaDeviceSynchronize());
  EXPECT_EQ(cudaEventRecord(recorded(nullptr), their_stream), cudaErrorInvalidResourceHandle);
  (void)cudaGetLastError();
}

TEST_P(SimulatorDeathTest, PageableSourceThatChanges) {
  float* const x = device_floats();
  std::vector<float> host(kCount, 1.0f);
  const cudaStream_t stream = new_stream();
  gpusim::set_schedule(Schedule::late, 1);
  OK(cudaMemcpyAsync(x, host.data(), kBytes, cudaMemcpyHostToDevice, stream));
  EXPECT_DEATH(
      {
        cudaMemcpyAsync(x, host.data(), kBytes, cudaMemcpyHostToDevice, stream);
        host[3] = 2.0f;
        cudaStreamSynchronize(stream);
      },
      "gpusim: pageable copy");
  OK(cudaStreamSynchronize(stream));
}

TEST_P(SimulatorDeathTest, CopiesPastTheEndOrOfTheWrongKind) {
  float* const x = device_floats();
  std::vector<float> host(kCount + 1);
  EXPECT_DEATH(cudaMemcpyAsync(x, host.data(), kBytes + 4, cudaMemcpyHostToDevice, nullptr),
               "gpusim: copy: 260 bytes reach past an allocation");
  EXPECT_DEATH(cudaMemcpyAsync(x, host.data(), kBytes, cudaMemcpyDeviceToDevice, nullptr),
               "gpusim: copy: cudaMemcpyDeviceToDevice from .*pageable");
}

TEST_P(Simulator, InjectedFaultsAnswerOnce) {
  gpusim::inject("cudaMalloc", 2, cudaErrorMemoryAllocation);
  void* data = nullptr;
  OK(cudaMalloc(&data, 4));
  EXPECT_EQ(cudaMalloc(&data, 4), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  OK(cudaGetLastError());
  OK(cudaMalloc(&data, 4));
  gpusim::inject("cudaLaunchKernel", 1, cudaErrorInvalidConfiguration);
  launch_fill(nullptr, static_cast<float*>(data), 1, 1.0f);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  gpusim::clear_injected();
}

TEST(Capacity, OfOneGpu) {
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, std::size_t{64} << 30), cudaErrorMemoryAllocation);
  EXPECT_EQ(data, nullptr);
  (void)cudaGetLastError();
}

TEST_P(Simulator, CountsKernelsWaitsAndContexts) {
  const auto before = gpusim::counters();
  float* const x = device_floats();
  launch_fill(nullptr, x, kCount, 1.0f);
  OK(cudaStreamSynchronize(nullptr));
  const auto after = gpusim::counters();
  EXPECT_EQ(after.kernels - before.kernels, 1u);
  EXPECT_TRUE(after.contexts.contains(0));
  EXPECT_EQ(after.waits.at("cudaStreamSynchronize"), (before.waits.contains("cudaStreamSynchronize")
                                                          ? before.waits.at("cudaStreamSynchronize")
                                                          : 0) +
                                                         1);
}

TEST_P(Simulator, ALostDeviceStaysLost) {
  EXPECT_EXIT(
      {
        gpusim::inject("cudaStreamSynchronize", 1, cudaErrorIllegalAddress);
        const bool first = cudaStreamSynchronize(nullptr) == cudaErrorIllegalAddress;
        void* data = nullptr;
        const bool later = cudaMalloc(&data, 4) == cudaErrorIllegalAddress;
        std::exit(first && later ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace cairn::test
