// Groups whose ranks meet over a communicator of the trainer's own.
#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "gpu/nccl_ranks.h"
#include "support/expect_error.h"

namespace cairn::gpusim {
namespace {

using parallel::ProcessGroup;
using parallel::ReduceOp;
using Body = std::function<void(ncclComm_t, int rank)>;

void end(ncclComm_t comm) {
  ncclCommFinalize(comm);
  OK(poll(comm, 10));
  OK(ncclCommDestroy(comm));
}

/// A thread a rank, whose GPU is counted from the last one down.
void run_with(int ranks, bool blocking, const Body& body,
              const std::function<void(ncclComm_t)>& after = end) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking ? 1 : 0;
      ncclComm_t comm = nullptr;
      OK(cudaSetDevice(kDevices - 1 - rank));
      ncclCommInitRankConfig(&comm, ranks, id, rank, &config);
      OK(poll(comm, 10));
      body(comm, rank);
      after(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<double> sum_over(const ProcessGroup& group, Device device) {
  const Tensor x =
      Tensor::from(std::vector<double>{1.0 + group.rank(), 10.0}, {2}, DType::f32, device);
  group.all_reduce(x, ReduceOp::sum, "x");
  if (device.is_cuda()) group.wait();
  return x.to_vector();
}

class FromNccl : public ::testing::TestWithParam<bool> {};

TEST_P(FromNccl, HasTheCommunicatorsRanksAndGpus) {
  run_with(3, GetParam(), [](ncclComm_t comm, int rank) {
    const auto group = ProcessGroup::from_nccl(comm);
    EXPECT_EQ(group.rank(), rank);
    EXPECT_EQ(group.world_size(), 3);
    EXPECT_EQ(group.local_rank(), rank);
    EXPECT_EQ(group.local_world_size(), 3);
    const Device own{core::DeviceType::cuda, kDevices - 1 - rank};
    EXPECT_EQ(group.device(), own);
    EXPECT_EQ(group.device("cuda"), own);
    EXPECT_EQ(group.device("cpu"), Device{});
    EXPECT_EQ(sum_over(group, own), (std::vector<double>{6.0, 30.0}));
    EXPECT_EQ(sum_over(group, Device{}), (std::vector<double>{6.0, 30.0}));
    EXPECT_EQ(sum_over(group.split(0, -rank), own), (std::vector<double>{6.0, 30.0}));
  });
}

TEST_P(FromNccl, LeavesTheCommunicatorToItsOwner) {
  run_with(2, GetParam(), [](ncclComm_t comm, int rank) {
    for (int i = 0; i < 2; ++i) {  // one group after another
      const auto group = ProcessGroup::from_nccl(comm);
      EXPECT_EQ(sum_over(group, group.device()), (std::vector<double>{3.0, 20.0}));
    }
    const Buffer<float> x(4, 1.0f + static_cast<float>(rank));
    ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, comm, nullptr);
    OK(poll(comm, 10));
    OK(cudaStreamSynchronize(nullptr));
    EXPECT_EQ(x.values(), std::vector<float>(4, 3.0f));
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, FromNccl, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "blocking" : "nonblocking"; });

TEST(FromNcclErrors, ACommunicatorOfOneIsAGroupOfOne) {
  run_with(1, true, [](ncclComm_t comm, int) {
    const auto group = ProcessGroup::from_nccl(comm);
    EXPECT_EQ(group.world_size(), 1);
    EXPECT_EQ(group.device().index, kDevices - 1);
  });
}

TEST(FromNcclErrors, NoCommunicator) {
  test::expect_error<core::InvalidArgument>([] { ProcessGroup::from_nccl(nullptr); },
                                            {"expected a communicator, got a null pointer"});
}

TEST(FromNcclErrors, ARankThatDoesNotComeIsWaitedForSoLong) {
  run_with(
      2, true,
      [](ncclComm_t comm, int rank) {
        if (rank == 1) return std::this_thread::sleep_for(std::chrono::seconds(2));
        test::expect_error<core::CommunicationError>(
            [&] { ProcessGroup::from_nccl(comm, {.rendezvous_timeout = std::chrono::seconds(1)}); },
            {"expected the 2 ranks of the communicator within 1000 ms, not all came"});
      },
      ncclCommAbort);
}

TEST(FromNcclErrors, AnAddressThatIsNotRankZerosIsToldToAll) {
  setenv("MASTER_ADDR", "no.such.host.invalid", 1);
  run_with(2, true, [](ncclComm_t comm, int) {
    test::expect_error<core::CommunicationError>([&] { ProcessGroup::from_nccl(comm); },
                                                 {"no.such.host.invalid"});
  });
  unsetenv("MASTER_ADDR");
}

}  // namespace
}  // namespace cairn::gpusim
