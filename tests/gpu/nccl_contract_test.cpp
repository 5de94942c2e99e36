// The simulated NCCL: calls that break its contract end the process and say how.
#include "gpu/nccl_ranks.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace cairn::gpusim {
namespace {

/// The process must end with this line.
void expect_report(const std::function<void(Rank&)>& fault, const std::string& line) {
  EXPECT_DEATH(run_ranks(2, fault), line);
}

TEST_F(SimulatedNcclDeathTest, HostMemory) {
  expect_report(
      [](Rank& me) {
        std::vector<float> x(4);
        ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, me.comm, me.stream);
      },
      "gpusim: nccl memory: ncclAllReduce's sendbuff is pageable host memory");
}

TEST_F(SimulatedNcclDeathTest, MemoryOfAnotherDevice) {
  expect_report(
      [](Rank& me) {
        cudaSetDevice(2);
        const Buffer<float> x(4, 1.0f);
        ncclBroadcast(x.data(), x.data(), 4, ncclFloat32, 0, me.comm, me.stream);
      },
      "gpusim: nccl memory: .* is memory of device 2, the communicator is device");
}

TEST_F(SimulatedNcclDeathTest, ASplitAheadOfWhatIsPending) {
  expect_report(
      [](Rank& me) {
        const Buffer<float> x(4, 1.0f);
        if (me.rank == 0)
          ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, me.comm, me.stream);
        ncclComm_t child = nullptr;
        ncclCommSplit(me.comm, 0, 0, &child, nullptr);
      },
      "gpusim: nccl split: ncclCommSplit with 1 operations pending");
}

TEST_F(SimulatedNcclDeathTest, ALocalThatASplitMayStillWrite) {
  EXPECT_DEATH(run_two([](Rank& me) {
                 ncclComm_t child = nullptr;
                 if (me.rank == 0) ncclCommSplit(me.comm, 0, 0, &child, nullptr);
                 ncclCommAbort(me.comm);
                 me.comm = nullptr;
               }),
               "gpusim: nccl split: a split that is aborted under way may still write");
}

TEST_F(SimulatedNcclDeathTest, BeyondTheEnd) {
  expect_report(
      [](Rank& me) {
        const Buffer<float> x(4, 1.0f);
        ncclAllReduce(x.data(), x.data(), 1000, ncclFloat32, ncclSum, me.comm, me.stream);
      },
      "gpusim: nccl memory: .* bytes, needs 4000");
}

TEST_F(SimulatedNcclDeathTest, StreamOfAnotherDevice) {
  expect_report(
      [](Rank& me) {
        const Buffer<float> x(4, 1.0f);
        cudaSetDevice(2);
        ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, me.comm, nullptr);
      },
      "gpusim: nccl stream: ncclAllReduce in a stream of device 2, the communicator is device");
}

TEST_F(SimulatedNcclDeathTest, BuffersThatOverlap) {
  expect_report(
      [](Rank& me) {
        const Buffer<float> x(8, 1.0f);
        ncclAllReduce(x.data(), x.data() + 2, 4, ncclFloat32, ncclSum, me.comm, me.stream);
      },
      "gpusim: nccl overlap: ncclAllReduce");
}

TEST_F(SimulatedNcclDeathTest, OperationsOfAGroupThatNeedEachOther) {
  expect_report(
      [](Rank& me) {
        const Buffer<float> x(8, 1.0f), y(16, 1.0f);
        ncclGroupStart();
        ncclAllReduce(x.data(), x.data(), 8, ncclFloat32, ncclSum, me.comm, me.stream);
        ncclAllGather(x.data(), y.data(), 8, ncclFloat32, me.comm, me.stream);
        ncclGroupEnd();
      },
      "gpusim: nccl group: all_gather of 8 f32 and all_reduce sum of 8 f32 of one group");
}

TEST_F(SimulatedNcclDeathTest, PartsInTheWrongPlace) {
  expect_report(
      [](Rank& me) {
        const Buffer<float> x(8, 1.0f);  // rank 0's part is the first, rank 1's the second
        ncclAllGather(x.data() + 4 * (1 - me.rank), x.data(), 4, ncclFloat32, me.comm, me.stream);
      },
      "gpusim: nccl overlap: ncclAllGather");
}

TEST_F(SimulatedNcclDeathTest, DestroyWithWorkPending) {
  expect_report(
      [](Rank& me) {
        if (me.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(5));
        const Buffer<float> x(8, 1.0f);
        ncclAllReduce(x.data(), x.data(), 8, ncclFloat32, ncclSum, me.comm, me.stream);
        ncclCommDestroy(me.comm);
      },
      "gpusim: nccl destroy: ncclCommDestroy with 1 operations pending");
}

TEST_F(SimulatedNcclDeathTest, UseAfterDestroy) {
  expect_report(
      [](Rank& me) {
        ncclCommDestroy(me.comm);
        ncclResult_t result;
        ncclCommGetAsyncError(me.comm, &result);
      },
      "gpusim: nccl handle: ncclCommGetAsyncError of a communicator that has been destroyed");
}

TEST_F(SimulatedNcclDeathTest, TwoThreadsAtOnce) {
  expect_report(
      [](Rank& me) {
        if (me.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(5));
        std::atomic<bool> done = false;
        std::thread other([&] {
          ncclCommFinalize(me.comm);  // waits for rank 1
          done = true;
        });
        ncclResult_t result;
        while (!done) ncclCommGetAsyncError(me.comm, &result);
        other.join();
      },
      "gpusim: nccl threads: ncclComm.* while another thread");
}

TEST_F(SimulatedNcclDeathTest, ACallBeforeTheLastOneIsDone) {
  EXPECT_DEATH(run_two([](Rank& me) {
                 const Buffer<float> x(8, 1.0f);
                 for (int i = 0; i < 2; ++i) {
                   ncclAllReduce(x.data(), x.data(), 8, ncclFloat32, ncclSum, me.comm, me.stream);
                 }
               }),
               "gpusim: nccl in progress: ncclAllReduce before ncclCommGetAsyncError");
}

}  // namespace
}  // namespace cairn::gpusim
