// Memory that goes from one stream to another, or to another library's: no race, and nothing waits.
#include <cuda_runtime_api.h>
#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "cairn/core/dlpack.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
#include "gpu/planted_kernels.h"
#include "gpu/sim/machine.h"
#include "gpu/sim/simulator.h"
#include "gpu/vendor_support.h"

namespace cairn::test {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

class Exchange : public testing::TestWithParam<gpusim::Schedule> {
 protected:
  Exchange() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    gpusim::set_schedule(GetParam(), 3);
    cudaStreamCreateWithFlags(&theirs_, cudaStreamNonBlocking);
  }
  cudaStream_t theirs_ = nullptr;
};
using ExchangeDeathTest = Exchange;
constexpr auto kAll = {gpusim::Schedule::late, gpusim::Schedule::early, gpusim::Schedule::shuffled};
INSTANTIATE_TEST_SUITE_P(Schedules, Exchange, testing::ValuesIn(kAll));
INSTANTIATE_TEST_SUITE_P(Schedules, ExchangeDeathTest, testing::ValuesIn(kAll));

TEST_P(Exchange, OfDlpackOrdersBothStreams) {
  Tensor x = Tensor::full({64}, 1.0, DType::f32, kGpu);
  DLManagedTensor* const out = core::to_dlpack(x, theirs_);
  launch_fill(theirs_, static_cast<float*>(out->dl_tensor.data), 64, 2.0f);
  out->deleter(out);
  kernels::fill(x, 3.0);  // after theirs
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(64, 3.0f));

  void* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, 256), cudaSuccess);
  launch_fill(theirs_, static_cast<float*>(data), 64, 5.0f);
  std::int64_t shape[] = {64};
  DLManagedTensor in{};
  in.dl_tensor = {data, {kDLCUDA, 0}, 1, {kDLFloat, 32, 1}, shape, nullptr, 0};
  EXPECT_EQ(core::from_dlpack(&in, theirs_).to_vector<float>(), std::vector<float>(64, 5.0f));
  launch_fill(theirs_, static_cast<float*>(data), 64, 6.0f);  // after ours
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_P(ExchangeDeathTest, OfAStreamThatNobodyNamedIsARace) {
  Tensor x = Tensor::full({64}, 1.0, DType::f32, kGpu);
  DLManagedTensor* const out = core::to_dlpack(x);
  EXPECT_DEATH(
      {
        launch_fill(theirs_, static_cast<float*>(out->dl_tensor.data), 64, 2.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: race");
  out->deleter(out);
}

// The block comes from the cache: nothing else gives the thread a context.
TEST_P(Exchange, AThreadThatHasCalledNothingYetFillsATensor) {
  Tensor::full({64}, 1.0, DType::f64, kGpu);
  std::thread([] {
    const Tensor x = Tensor::full({64}, 2.5, DType::f64, kGpu);
    EXPECT_EQ(x.to_vector<double>(), std::vector<double>(64, 2.5));
  }).join();
}

// The first pass over a list uploads its table of pointers.
TEST_P(Exchange, ANewListOfTensorsIsNotWaitedFor) {
  const Tensor x = Tensor::full({64}, 2.0, DType::f32, kGpu);
  kernels::fill(x, 1.0);
  const auto before = gpusim::counters().waits;
  (void)kernels::multi_tensor_scale({x}, {x}, 0.5);
  EXPECT_EQ(gpusim::counters().waits, before);
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(64, 0.5f));
}

// The bytes of a table stay in pinned memory until they have been copied.
TEST_P(Exchange, NewListsInARowHaveTheirOwnTables) {
  const Tensor x = Tensor::full({64}, 2.0, DType::f32, kGpu);
  const Tensor y = Tensor::full({64}, 4.0, DType::f32, kGpu);
  core::Stream::current(kGpu).synchronize();
  (void)kernels::multi_tensor_scale({x}, {x}, 0.5);
  (void)kernels::multi_tensor_scale({y}, {y}, 0.5);
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(64, 1.0f));
  EXPECT_EQ(y.to_vector<float>(), std::vector<float>(64, 2.0f));
}

// Two streams that nothing orders read one list: each has a table of its own.
TEST_P(Exchange, AListOnTwoStreamsIsNoRace) {
  const Tensor x = Tensor::full({64}, 2.0, DType::f32, kGpu);
  core::Stream::current(kGpu).synchronize();
  const core::Stream streams[] = {core::Stream::create(kGpu), core::Stream::create(kGpu)};
  for (const core::Stream& stream : streams) {
    const core::StreamGuard guard(stream);
    (void)kernels::check_tensors({x.view()});
  }
  for (const core::Stream& stream : streams) stream.synchronize();
}

// Ranks of threads: the memory of one's table is had by waiting for its GPU, and that for another
// rank, which needs a table first.
TEST(PointerTables, OfAGpuAreMadeWhileAnotherGpuIsWaitedFor) {
  gpusim::set_schedule(gpusim::Schedule::late, 3);
  const Device second{DeviceType::cuda, 1};
  const Tensor x = Tensor::full({64}, 2.0, DType::f32, kGpu);
  const Tensor y = Tensor::full({64}, 2.0, DType::f32, second);
  const core::Stream busy = core::Stream::create(kGpu), fresh = core::Stream::create(kGpu);
  const core::DeviceGuard device(kGpu);
  {
    const core::StreamGuard guard(busy);
    Tensor::empty({std::int64_t{1} << 20}, DType::f32, kGpu);  // goes back where memory is short
  }
  const auto of_fresh = [&](std::int64_t bytes) {
    const core::StreamGuard guard(fresh);
    return Tensor::empty({bytes}, DType::u8, kGpu);
  };
  // There is room for what the pass finds, in a segment or without, and none for the table.
  const Tensor segment = of_fresh((std::int64_t{2} << 20) - 512);
  of_fresh(24);
  core::Stream::current(kGpu).synchronize();

  std::atomic<bool> other_done = false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto in_time = [=] { return std::chrono::steady_clock::now() < deadline; };
  {
    const gpusim::Call call("busy");
    gpusim::enqueue(*gpusim::find_stream(busy.native()),
                    {"busy", [] {}, [&, in_time] { return other_done || !in_time(); }});
  }
  const auto frees = [] { return gpusim::counters().calls["cudaFree"]; };
  const auto frees_before = frees();
  std::thread other([&] {
    while (frees() == frees_before && in_time()) std::this_thread::yield();
    (void)kernels::multi_tensor_scale({y}, {y}, 0.5);
    other_done = true;
  });
  gpusim::inject("cudaMalloc", 1, cudaErrorMemoryAllocation);
  {
    const core::StreamGuard guard(fresh);
    (void)kernels::multi_tensor_scale({x}, {x}, 0.5);
  }
  EXPECT_TRUE(other_done && in_time());
  other.join();
  gpusim::clear_injected();
  fresh.synchronize();
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(64, 1.0f));
  EXPECT_EQ(y.to_vector<float>(), std::vector<float>(64, 1.0f));
}

}  // namespace
}  // namespace cairn::test
