// Two communicators of one device: what is in one order on every rank, and planted orders that are
// not.
#include "gpu/nccl_ranks.h"

namespace cairn::gpusim {
namespace {

/// A second communicator of some of the ranks; null for the others.
ncclComm_t second_of(const Rank& me, bool member = true) {
  ncclComm_t second = nullptr;
  EXPECT_EQ(ncclCommSplit(me.comm, member ? 0 : NCCL_SPLIT_NOCOLOR, me.rank, &second, nullptr),
            ncclSuccess);
  return second;
}

void sum(const Buffer<float>& x, ncclComm_t comm, cudaStream_t stream) {
  EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
}

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  return stream;
}

/// The second stream comes after what the first has.
void follow(cudaStream_t first, cudaStream_t second) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, first), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
}

TEST_F(SimulatedNccl, CommunicatorsTakeTurnsInStreamsThatWaitForEachOther) {
  run_ranks(2, [](Rank& me) {
    const ncclComm_t second = second_of(me);
    const cudaStream_t other = new_stream();
    const Buffer<float> x(4, 1.0f), y(4, 1.0f);
    for (int i = 0; i < 3; ++i) {
      sum(x, me.comm, me.stream);
      sum(y, second, me.stream);
      follow(me.stream, other);
      sum(x, me.comm, other);
      follow(other, me.stream);
    }
    OK(cudaStreamSynchronize(me.stream));
    sum(y, second, other);  // the host has waited
    OK(cudaStreamSynchronize(other));
    EXPECT_EQ(x.values()[3], 64.0f);
    EXPECT_EQ(y.values()[3], 16.0f);
    OK(ncclCommDestroy(second));
  });
}

// None of the two can wait for the other in both.
TEST_F(SimulatedNccl, CommunicatorsThatShareOneRankNeedNoOrder) {
  run_ranks(3, [](Rank& me) {
    const ncclComm_t left = second_of(me, me.rank < 2), right = second_of(me, me.rank > 0);
    const cudaStream_t other = new_stream();
    const Buffer<float> x(4, 1.0f), y(4, 1.0f);
    if (left != nullptr) sum(x, left, me.stream);
    if (right != nullptr) sum(y, right, other);
    OK(cudaStreamSynchronize(me.stream));
    OK(cudaStreamSynchronize(other));
    EXPECT_EQ(x.values()[0], left == nullptr ? 1.0f : 2.0f);
    EXPECT_EQ(y.values()[0], right == nullptr ? 1.0f : 2.0f);
    for (const ncclComm_t comm : {left, right}) {
      if (comm == nullptr) continue;
      OK(ncclCommDestroy(comm));
    }
  });
}

// In one stream each, where they wait for each other on any machine.
TEST_F(SimulatedNcclDeathTest, CommunicatorsInAnotherOrderOnAnotherRank) {
  EXPECT_DEATH(run_ranks(2,
                         [](Rank& me) {
                           const ncclComm_t second = second_of(me);
                           const Buffer<float> x(4, 1.0f), y(4, 1.0f);
                           if (me.rank == 0) sum(x, me.comm, me.stream);
                           sum(y, second, me.stream);
                           if (me.rank == 1) sum(x, me.comm, me.stream);
                           cudaStreamSynchronize(me.stream);
                         }),
               "gpusim: nccl order: collective 0 of communicator .* follows [01] of communicator "
               ".* on rank [01], and [01] on rank [01]");
}

// In streams of their own, ordered on each rank by the host alone.
TEST_F(SimulatedNcclDeathTest, CommunicatorsInStreamsThatNothingOrders) {
  EXPECT_DEATH(run_ranks(2,
                         [](Rank& me) {
                           const ncclComm_t second = second_of(me);
                           const cudaStream_t other = new_stream();
                           const Buffer<float> x(4, 1.0f), y(4, 1.0f);
                           sum(x, me.comm, me.stream);
                           sum(y, second, other);
                           cudaStreamSynchronize(me.stream);
                           cudaStreamSynchronize(other);
                         }),
               "gpusim: nccl order: nccl all_reduce sum of 4 f32 of communicator .* and nccl "
               "all_reduce sum of 4 f32 of communicator .* are in streams that nothing orders");
}

}  // namespace
}  // namespace cairn::gpusim
