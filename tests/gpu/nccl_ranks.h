// What the tests of the simulated NCCL share: ranks that are threads, each with a GPU of its own.
#pragma once

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "gpu/sim/simulator.h"

namespace cairn::gpusim {

inline constexpr int kDevices = 4;
inline const bool kConfigured = [] {
  setenv("CAIRN_SIM_GPUS", std::to_string(kDevices).c_str(), 1);
  return true;
}();

#define OK(call) ASSERT_EQ(static_cast<int>(call), 0) << #call

/// Memory of the current device.
template <class T>
class Buffer {
 public:
  explicit Buffer(const std::vector<T>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, bytes()), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyDefault), cudaSuccess);
  }
  Buffer(std::size_t size, T value) : Buffer(std::vector<T>(size, value)) {}
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return static_cast<T*>(data_); }
  std::size_t bytes() const { return size_ * sizeof(T); }
  std::vector<T> values() const {
    std::vector<T> out(size_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, bytes(), cudaMemcpyDefault), cudaSuccess);
    return out;
  }

 private:
  std::size_t size_;
  void* data_ = nullptr;
};

struct Rank {
  int rank = 0, ranks = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};

inline void run_rank(Rank& me, const ncclUniqueId& id, const std::function<void(Rank&)>& body) {
  OK(cudaSetDevice(me.rank));
  OK(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
  OK(ncclCommInitRank(&me.comm, me.ranks, id, me.rank));
  body(me);
  OK(cudaStreamSynchronize(me.stream));
  if (me.comm != nullptr) {
    OK(ncclCommFinalize(me.comm));
    OK(ncclCommDestroy(me.comm));
  }
  OK(cudaStreamDestroy(me.stream));
}

/// The body in a thread a rank, each with a device, a stream and a communicator. A body that
/// destroys its communicator sets it to null.
inline void run_ranks(int ranks, const std::function<void(Rank&)>& body) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank me{rank, ranks};
      run_rank(me, id, body);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline ncclComm_t begin_nonblocking(const ncclUniqueId& id, int ranks, int rank) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
  EXPECT_EQ(ncclCommInitRankConfig(&comm, ranks, id, rank, &config), ncclInProgress);
  return comm;
}

/// Polls until it is something else than ncclInProgress, for at most `seconds`.
inline ncclResult_t poll(ncclComm_t comm, double seconds, int* polls = nullptr) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  ncclResult_t result = ncclInProgress;
  while (result == ncclInProgress && std::chrono::steady_clock::now() < end) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &result), ncclSuccess);
    if (polls != nullptr) ++*polls;
    if (result == ncclInProgress) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return result;
}

/// Two ranks with communicators that do not block.
inline void run_two(const std::function<void(Rank&)>& body) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Rank me{rank, 2, begin_nonblocking(id, 2, rank), nullptr};
      OK(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
      OK(poll(me.comm, 5));
      body(me);
      if (me.comm != nullptr) {
        OK(ncclCommAbort(me.comm));
      }
      OK(cudaStreamSynchronize(me.stream));
      OK(cudaStreamDestroy(me.stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<std::string> folders() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("cairn-gpusim-nccl-" + std::to_string(getpid()) + "-"))
      names.push_back(name);
  }
  return names;
}

class SimulatedNccl : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override {
    clear_injected();
    EXPECT_THAT(folders(), testing::IsEmpty());
  }
};
using SimulatedNcclDeathTest = SimulatedNccl;

}  // namespace cairn::gpusim
