// The emulator itself: indices, barriers, warp functions, and that it catches what it promises to
// catch.
#include "simt/emulator.h"

#include <gtest/gtest.h>

#include <numeric>

namespace {

using cairn::simt::launch;
using cairn::simt::Order;

class ScheduleGuard {
 public:
  explicit ScheduleGuard(Order order, std::uint64_t seed = 7) {
    cairn::simt::schedule() = {order, seed};
  }
  ~ScheduleGuard() { cairn::simt::schedule() = {}; }
};

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const cairn::simt::Error& error) {
    return error.what();
  }
  return "no error";
}

__global__ void index_kernel(int* out) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] +=
      static_cast<int>(thread + 1000 * block);
}

TEST(Emulator, EveryThreadOfEveryBlockRunsOnce) {
  for (Order order : {Order::forward, Order::reverse, Order::shuffled}) {
    ScheduleGuard guard(order);
    std::vector<int> out(24 * 60, 0);
    launch({dim3(4, 3, 2), dim3(5, 4, 3)}, index_kernel, out.data());
    for (int block = 0; block < 24; ++block) {
      for (int thread = 0; thread < 60; ++thread) {
        ASSERT_EQ(out[static_cast<std::size_t>(block * 60 + thread)], thread + 1000 * block);
      }
    }
  }
}

template <bool kBarrier>
__global__ void reverse_kernel(const int* x, int* y) {
  SIMT_SHARED(int, tile, 64);
  tile[threadIdx.x] = x[threadIdx.x];
  if (kBarrier) __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];
}

std::vector<int> reversed(void (*kernel)(const int*, int*), Order order) {
  ScheduleGuard guard(order);
  std::vector<int> x(64), y(64);
  std::iota(x.begin(), x.end(), 0);
  launch({1, 64}, kernel, x.data(), y.data());
  return y;
}

TEST(Emulator, BarrierOrdersSharedMemory) {
  std::vector<int> expected(64);
  std::iota(expected.rbegin(), expected.rend(), 0);
  for (Order order : {Order::forward, Order::reverse, Order::shuffled}) {
    EXPECT_EQ(reversed(reverse_kernel<true>, order), expected);
  }
}

TEST(Emulator, OtherOrdersExposeAMissingBarrier) {
  EXPECT_NE(reversed(reverse_kernel<false>, Order::forward),
            reversed(reverse_kernel<false>, Order::reverse));
}

__global__ void fresh_shared_kernel(int* out) {
  SIMT_SHARED(int, tile, 2);
  SIMT_DYNAMIC_SHARED(int, dynamic);
  out[2 * blockIdx.x] = tile[0];
  out[2 * blockIdx.x + 1] = dynamic[2];
  tile[0] = dynamic[2] = 5;
}

TEST(Emulator, SharedMemoryStartsPoisonedInEachBlock) {
  std::vector<int> out(6, 0);
  launch({3, 1, 12}, fresh_shared_kernel, out.data());
  EXPECT_EQ(out, std::vector<int>(6, -1));
}

__global__ void warp_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32), value = static_cast<int>(threadIdx.x);
  int* row = out + threadIdx.x * 6;
  row[0] = __shfl_xor_sync(~0u, value, 5);
  row[1] = __shfl_down_sync(~0u, value, 3);
  row[2] = __shfl_up_sync(~0u, value, 3);
  row[3] = __shfl_sync(~0u, value, 7);
  row[4] = __shfl_down_sync(~0u, value, 2, 8);
  row[5] = static_cast<int>(__ballot_sync(~0u, lane % 3 == 0));
}

TEST(Emulator, WarpFunctions) {
  for (Order order : {Order::forward, Order::reverse, Order::shuffled}) {
    ScheduleGuard guard(order);
    std::vector<int> out(64 * 6);
    launch({1, 64}, warp_kernel, out.data());
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; lane += 3) votes |= 1u << lane;
    for (int t = 0; t < 64; ++t) {
      const int lane = t % 32, first = t - lane;
      const int* row = out.data() + t * 6;
      ASSERT_EQ(row[0], first + (lane ^ 5));
      ASSERT_EQ(row[1], lane + 3 < 32 ? t + 3 : t);
      ASSERT_EQ(row[2], lane >= 3 ? t - 3 : t);
      ASSERT_EQ(row[3], first + 7);
      ASSERT_EQ(row[4], lane % 8 + 2 < 8 ? t + 2 : t);
      ASSERT_EQ(static_cast<unsigned>(row[5]), votes);
    }
  }
}

__global__ void half_warp_sum_kernel(double* out) {  // the two halves shuffle on their own
  const unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
  double value = threadIdx.x;
  for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step, 16);
  out[threadIdx.x] = value;
}

TEST(Emulator, PartialMasksMoveSixtyFourBits) {
  std::vector<double> out(32);
  launch({1, 32}, half_warp_sum_kernel, out.data());
  EXPECT_EQ(out[0], 120.0);
  EXPECT_EQ(out[31], 376.0);
}

__global__ void leaving_kernel() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
__global__ void two_barriers_kernel() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_against_warp_kernel() {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __ballot_sync(~0u, 1);
  }
}

TEST(Emulator, DivergentBarriersAreErrors) {
  for (Order order : {Order::forward, Order::reverse, Order::shuffled}) {
    ScheduleGuard guard(order);
    EXPECT_NE(error_of([] {
                launch({1, 64}, leaving_kernel);
              }).find("divergent barrier"),
              std::string::npos);
    EXPECT_NE(error_of([] {
                launch({1, 64}, two_barriers_kernel);
              }).find("different barriers"),
              std::string::npos);
    EXPECT_NE(error_of([] {
                launch({1, 32}, barrier_against_warp_kernel);
              }).find("deadlock"),
              std::string::npos);
  }
}

__global__ void inactive_source_kernel() {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 20);
}
__global__ void foreign_mask_kernel() {
  if (threadIdx.x >= 16) __shfl_sync(0x0000ffffu, 1, 3);
}
__global__ void partial_warp_kernel() {
  __shfl_xor_sync(~0u, 1, 1);
}

TEST(Emulator, ShufflesWithInactiveLanesAreErrors) {
  EXPECT_NE(error_of([] {
              launch({1, 32}, inactive_source_kernel);
            }).find("inactive lane"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              launch({1, 32}, foreign_mask_kernel);
            }).find("leaves it out"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              launch({1, 24}, partial_warp_kernel);
            }).find("do not exist"),
            std::string::npos);
}

TEST(Emulator, RunsAgainAfterAnError) {
  EXPECT_NE(error_of([] { launch({1, 64}, leaving_kernel); }), "no error");
  std::vector<int> out(64 * 6);
  launch({1, 64}, warp_kernel, out.data());
  EXPECT_EQ(out[3], 7);
}

__global__ void counting_kernel(int* counter, int* largest) {
  atomicAdd(counter, 2);
  atomicMax(largest, static_cast<int>(threadIdx.x + blockIdx.x));
}

TEST(Emulator, Atomics) {
  int counter = 0, largest = -1;
  launch({5, 96}, counting_kernel, &counter, &largest);
  EXPECT_EQ(counter, 960);
  EXPECT_EQ(largest, 99);
}

TEST(Emulator, LaunchLimits) {
  EXPECT_NE(error_of([] {
              launch({1, 1025}, partial_warp_kernel);
            }).find("1 to 1024"),
            std::string::npos);
  EXPECT_NE(error_of([] { launch({dim3(1, 70000), 32}, partial_warp_kernel); }), "no error");
  EXPECT_NE(error_of([] { launch({0, 32}, partial_warp_kernel); }), "no error");
  EXPECT_NE(error_of([] { launch({1, 32, 164 << 10}, partial_warp_kernel); }), "no error");
}

__global__ void copying_kernel(const int* x, int* y, bool waits, bool ends) {
  SIMT_DYNAMIC_SHARED(int, tile);
  cairn::simt::copy_async(tile + 4 * threadIdx.x, x + 4 * threadIdx.x,
                          cairn::simt::Site::current());
  if (waits) cairn::simt::wait_for_copies();
  __syncthreads();
  y[threadIdx.x] = tile[(4 * threadIdx.x + 4) % 256];
  __syncthreads();
  if (ends) cairn::simt::wait_for_copies();
}

TEST(Emulator, CopiesArriveWhenTheirThreadHasWaited) {
  std::vector<int> x(256), y(64);
  std::iota(x.begin(), x.end(), 0);
  launch({1, 64, 1024}, copying_kernel, x.data(), y.data(), true, true);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(y[static_cast<std::size_t>(i)], (4 * i + 4) % 256);
  launch({1, 64, 1024}, copying_kernel, x.data(), y.data(), false, true);
  EXPECT_EQ(y, std::vector<int>(64, -1));
  EXPECT_NE(error_of([&] {
              launch({1, 64, 1024}, copying_kernel, x.data(), y.data(), false, false);
            }).find("asynchronous copies under way"),
            std::string::npos);
}

__global__ void matrices_kernel(const std::uint16_t* x, std::uint32_t* y, bool transposed) {
  SIMT_DYNAMIC_SHARED(std::uint16_t, rows);
  for (unsigned i = threadIdx.x; i < 256; i += 32) rows[i] = x[i];
  __syncwarp();
  std::uint32_t words[4];
  cairn::simt::load_matrices(rows + 8 * threadIdx.x, transposed, words,
                             cairn::simt::Site::current());
  for (unsigned i = 0; i < 4; ++i) y[4 * threadIdx.x + i] = words[i];
}

// PTX ISA: lane l holds row l / 4 and columns 2 (l % 4) and the next of each 8 x 8 matrix.
TEST(Emulator, MatricesAreSpreadOverTheLanes) {
  std::vector<std::uint16_t> x(256);
  std::iota(x.begin(), x.end(), std::uint16_t{0});  // 64 matrix + 8 row + column
  std::vector<std::uint32_t> y(128);
  launch({1, 32, 512}, matrices_kernel, x.data(), y.data(), false);
  EXPECT_EQ(y[4 * 9 + 2], (128u + 8 * 2 + 2) | (128u + 8 * 2 + 3) << 16);
  launch({1, 32, 512}, matrices_kernel, x.data(), y.data(), true);
  EXPECT_EQ(y[4 * 9 + 2], (128u + 8 * 2 + 2) | (128u + 8 * 3 + 2) << 16);
}

#if defined(__SANITIZE_ADDRESS__)
__global__ void shared_overrun_kernel(int* out) {
  SIMT_SHARED(int, tile, 31);
  tile[threadIdx.x] = 1;
  out[0] = tile[0];
}

TEST(EmulatorDeathTest, SharedOverrunsAreSeen) {
  int out = 0;
  EXPECT_DEATH(launch({1, 32}, shared_overrun_kernel, &out), "heap-buffer-overflow");
}
#endif

}  // namespace
