// The simulated NCCL: clean collectives against a reference in double precision, communicators that
// do not block, and planted faults, each of which must be found.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "gpu/nccl_ranks.h"
#include "gpu/sim/simulator.h"

namespace cairn::gpusim {
namespace {

using testing::HasSubstr;

// ---- Clean operations

template <class T>
T convert(double x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

template <class T>
double to_double(T x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else
    return static_cast<double>(x);
}

double value_at(int rank, std::size_t i) {
  return static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 3) % 5) + 1;
}

template <class T>
std::vector<T> contribution(int rank, std::size_t n) {
  std::vector<T> values;
  for (std::size_t i = 0; i < n; ++i) values.push_back(convert<T>(value_at(rank, i)));
  return values;
}

double reference(int ranks, std::size_t i, ncclRedOp_t op) {
  double out = value_at(0, i);
  for (int rank = 1; rank < ranks; ++rank) {
    const double x = value_at(rank, i);
    out = op == ncclProd  ? out * x
          : op == ncclMax ? std::max(out, x)
          : op == ncclMin ? std::min(out, x)
                          : out + x;
  }
  return op == ncclAvg ? out / ranks : out;
}

template <class T>
void expect_values(const std::vector<T>& got, const std::function<double(std::size_t)>& expected,
                   double tolerance) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double want = std::is_integral_v<T> ? std::floor(expected(i)) : expected(i);
    ASSERT_NEAR(to_double(got[i]), want, tolerance * want) << i;
  }
}

template <class T>
void check_reductions(const Rank& me, ncclDataType_t type, double tolerance) {
  for (const std::size_t n : {1, 5, 1000}) {
    for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
      const Buffer<T> x(contribution<T>(me.rank, n)), y(n, T{});
      OK(ncclAllReduce(x.data(), y.data(), n, type, op, me.comm, me.stream));
      OK(ncclReduce(x.data(), x.data(), n, type, op, me.ranks - 1, me.comm, me.stream));
      OK(cudaStreamSynchronize(me.stream));
      const auto want = [&](std::size_t i) { return reference(me.ranks, i, op); };
      expect_values(y.values(), want, op == ncclAvg ? tolerance : 0);
      if (me.rank == me.ranks - 1) expect_values(x.values(), want, op == ncclAvg ? tolerance : 0);
    }
  }
}

template <class T>
void check_parts(const Rank& me, ncclDataType_t type) {
  constexpr std::size_t n = 33;
  const auto ranks = static_cast<std::size_t>(me.ranks), rank = static_cast<std::size_t>(me.rank);
  const Buffer<T> whole(contribution<T>(me.rank, n * ranks)), all(n * ranks, T{});
  T* const part = whole.data() + rank * n;
  OK(ncclReduceScatter(whole.data(), part, n, type, ncclSum, me.comm, me.stream));
  OK(ncclAllGather(part, all.data(), n, type, me.comm, me.stream));
  OK(cudaStreamSynchronize(me.stream));
  expect_values(
      all.values(), [&](std::size_t i) { return reference(me.ranks, i, ncclSum); }, 0);
  for (int root = 0; root < me.ranks; ++root) {
    const Buffer<T> x(contribution<T>(me.rank, n));
    OK(ncclBroadcast(x.data(), x.data(), n, type, root, me.comm, me.stream));
    OK(cudaStreamSynchronize(me.stream));
    expect_values(
        x.values(), [&](std::size_t i) { return value_at(root, i); }, 0);
  }
}

template <class T>
void check_type(const Rank& me, ncclDataType_t type, double tolerance) {
  check_reductions<T>(me, type, tolerance);
  check_parts<T>(me, type);
}

void check_types(const Rank& me) {
  check_type<std::int8_t>(me, ncclInt8, 0);
  check_type<std::uint8_t>(me, ncclUint8, 0);
  check_type<std::int32_t>(me, ncclInt32, 0);
  check_type<std::uint32_t>(me, ncclUint32, 0);
  check_type<std::int64_t>(me, ncclInt64, 0);
  check_type<std::uint64_t>(me, ncclUint64, 0);
  check_type<__half>(me, ncclFloat16, 3e-3);
  check_type<__nv_bfloat16>(me, ncclBfloat16, 3e-2);
  check_type<float>(me, ncclFloat32, 1e-6);
  check_type<double>(me, ncclFloat64, 1e-15);
}

TEST_F(SimulatedNccl, ReducesAndMovesEveryTypeBetweenTwo) {
  run_ranks(2, check_types);
}
TEST_F(SimulatedNccl, ReducesAndMovesEveryTypeBetweenThree) {
  run_ranks(3, check_types);
}

TEST_F(SimulatedNccl, RoundsAtEachHopOfItsRing) {
  run_ranks(3, [](Rank& me) {
    const Buffer<__half> x(24, convert<__half>(me.rank == 1 ? 2048 : 1));
    OK(ncclAllReduce(x.data(), x.data(), 24, ncclFloat16, ncclSum, me.comm, me.stream));
    OK(cudaStreamSynchronize(me.stream));
    const auto got = x.values();
    EXPECT_EQ(to_double(got[0]), 2048);   // (2048 + 1) + 1
    EXPECT_EQ(to_double(got[8]), 2050);   // (1 + 1) + 2048
    EXPECT_EQ(to_double(got[16]), 2048);  // (1 + 2048) + 1
  });
}

TEST_F(SimulatedNccl, SendsAroundARing) {
  run_ranks(3, [](Rank& me) {
    const Buffer<float> x(5, static_cast<float>(me.rank)), y(5, -1.0f);
    OK(ncclGroupStart());
    OK(ncclSend(x.data(), 5, ncclFloat32, (me.rank + 1) % 3, me.comm, me.stream));
    OK(ncclRecv(y.data(), 5, ncclFloat32, (me.rank + 2) % 3, me.comm, me.stream));
    OK(ncclGroupEnd());
    OK(cudaStreamSynchronize(me.stream));
    EXPECT_EQ(y.values()[4], static_cast<float>((me.rank + 2) % 3));
  });
}

TEST_F(SimulatedNccl, DoesTheCollectivesOfAGroupInOrder) {
  run_ranks(3, [](Rank& me) {
    const auto rank = static_cast<float>(me.rank);
    const Buffer<float> x(50, rank), y(150, -1.0f), z(9, rank);
    for (int i = 0; i < 20; ++i) {
      OK(ncclGroupStart());
      OK(ncclAllReduce(x.data(), x.data(), 50, ncclFloat32, ncclMax, me.comm, me.stream));
      OK(ncclGroupStart());
      OK(ncclAllGather(z.data(), y.data(), 9, ncclFloat32, me.comm, me.stream));
      OK(ncclGroupEnd());
      OK(ncclGroupEnd());
      OK(ncclBroadcast(x.data(), z.data(), 9, ncclFloat32, 1, me.comm, me.stream));
    }
    OK(cudaStreamSynchronize(me.stream));
    EXPECT_EQ(x.values(), std::vector<float>(50, 2.0f));
    EXPECT_EQ(y.values()[0], 2.0f);
  });
}

TEST_F(SimulatedNccl, SplitsByColorAndOrdersByKey) {
  run_ranks(4, [](Rank& me) {
    ncclComm_t half = nullptr;
    OK(ncclCommSplit(me.comm, me.rank % 2, -me.rank, &half, nullptr));
    int ranks = 0, rank = -1, device = -1;
    OK(ncclCommCount(half, &ranks));
    OK(ncclCommUserRank(half, &rank));
    OK(ncclCommCuDevice(half, &device));
    EXPECT_EQ(ranks, 2);
    EXPECT_EQ(rank, me.rank < 2 ? 1 : 0);
    EXPECT_EQ(device, me.rank);
    const Buffer<float> x(3, static_cast<float>(me.rank));
    OK(ncclAllReduce(x.data(), x.data(), 3, ncclFloat32, ncclSum, half, me.stream));
    OK(cudaStreamSynchronize(me.stream));
    EXPECT_EQ(x.values()[0], me.rank % 2 == 0 ? 2.0f : 4.0f);
    OK(ncclCommDestroy(half));
  });
}

/// Every rank's result where rank r has the ids that ids_of(r) gives it.
std::vector<ncclResult_t> init_scalable(
    int ranks, const std::function<std::vector<ncclUniqueId>(int rank)>& ids_of) {
  std::vector<ncclResult_t> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<ncclUniqueId> ids = ids_of(rank);
      ncclComm_t comm = nullptr;
      OK(cudaSetDevice(rank));
      ncclResult_t& result = results[static_cast<std::size_t>(rank)];
      result = ncclCommInitRankScalable(&comm, ranks, rank, static_cast<int>(ids.size()),
                                        ids.data(), nullptr);
      if (result == ncclSuccess) {
        const Buffer<float> x(3, 1.0f);
        OK(ncclAllReduce(x.data(), x.data(), 3, ncclFloat32, ncclSum, comm, nullptr));
        EXPECT_EQ(x.values()[2], static_cast<float>(ranks));
        OK(ncclCommFinalize(comm));
        OK(ncclCommDestroy(comm));
      } else {
        OK(ncclCommAbort(comm));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::vector<ncclUniqueId> new_ids(int count) {
  std::vector<ncclUniqueId> ids(static_cast<std::size_t>(count));
  for (ncclUniqueId& id : ids) EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return ids;
}

TEST_F(SimulatedNccl, SeveralIdsMakeOneCommunicator) {
  const auto ids = new_ids(2);
  EXPECT_THAT(init_scalable(4, [&](int) { return ids; }), testing::Each(ncclSuccess));
}

TEST_F(SimulatedNccl, OneThreadMayHoldSeveralRanks) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  ncclComm_t comms[2];
  OK(ncclGroupStart());
  for (int rank = 0; rank < 2; ++rank) {
    OK(cudaSetDevice(rank));
    OK(ncclCommInitRank(&comms[rank], 2, id, rank));
  }
  OK(ncclGroupEnd());
  OK(cudaSetDevice(0));
  const Buffer<float> a(7, 1.0f);
  OK(cudaSetDevice(1));
  const Buffer<float> b(7, 2.0f);
  OK(ncclGroupStart());
  OK(ncclAllReduce(b.data(), b.data(), 7, ncclFloat32, ncclSum, comms[1], nullptr));
  OK(cudaSetDevice(0));
  OK(ncclAllReduce(a.data(), a.data(), 7, ncclFloat32, ncclSum, comms[0], nullptr));
  OK(ncclGroupEnd());
  EXPECT_EQ(a.values()[6], 3.0f);
  OK(cudaSetDevice(1));
  EXPECT_EQ(b.values()[6], 3.0f);
  OK(cudaSetDevice(0));
  OK(ncclCommAbort(comms[0]));
  OK(ncclCommAbort(comms[1]));
}

TEST_F(SimulatedNccl, RemovesWhatAKilledJobHasLeft) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  const std::string folder = "/dev/shm/cairn-gpusim-nccl-" + std::to_string(child) + "-1-ab";
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/joined.r0") << child << " 0 2";
  run_ranks(2, [](Rank&) {});
  EXPECT_FALSE(std::filesystem::exists(folder));
}

// ---- Communicators that do not block

TEST_F(SimulatedNccl, StaysInProgressWhileARankDoesNotCome) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  const ncclComm_t comm = begin_nonblocking(id, 2, 0);
  EXPECT_EQ(poll(comm, 0.1), ncclInProgress);
  OK(ncclCommAbort(comm));
}

TEST_F(SimulatedNccl, QueuesOnlyWhenAPollSaysSuccess) {
  run_two([](Rank& me) {
    const Buffer<float> x(4, 1.0f);
    int polls = 0;
    EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, me.comm, me.stream),
              ncclInProgress);
    OK(cudaStreamSynchronize(me.stream));  // nothing is there yet
    EXPECT_EQ(x.values()[0], 1.0f);
    OK(poll(me.comm, 5, &polls));
    EXPECT_GT(polls, 1);
    OK(cudaStreamSynchronize(me.stream));
    EXPECT_EQ(x.values()[0], 2.0f);
    EXPECT_EQ(ncclCommFinalize(me.comm), ncclInProgress);
    OK(poll(me.comm, 5));
    OK(ncclCommDestroy(me.comm));
    me.comm = nullptr;
  });
}

TEST_F(SimulatedNccl, FinalizeWaitsForTheOtherRank) {
  run_two([](Rank& me) {
    if (me.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return;
    }
    EXPECT_EQ(ncclCommFinalize(me.comm), ncclInProgress);
    EXPECT_EQ(poll(me.comm, 0.1), ncclInProgress);
  });
}

// ---- Planted faults

bool still_runs(cudaStream_t stream) {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return cudaStreamQuery(stream) == cudaErrorNotReady;
}

TEST_F(SimulatedNccl, RanksInDifferentOrderHangAndAreNamed) {
  testing::internal::CaptureStderr();
  run_two([](Rank& me) {
    const Buffer<float> x(4, 1.0f);
    if (me.rank == 0) {
      EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, me.comm, me.stream),
                ncclInProgress);
    } else {
      EXPECT_EQ(ncclBroadcast(x.data(), x.data(), 3, ncclFloat32, 1, me.comm, me.stream),
                ncclInProgress);
    }
    OK(poll(me.comm, 5));
    EXPECT_TRUE(still_runs(me.stream));
    EXPECT_TRUE(still_runs(me.stream));
    OK(ncclCommAbort(std::exchange(me.comm, nullptr)));
    OK(cudaStreamSynchronize(me.stream));
  });
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("gpusim: nccl order: rank "));
  EXPECT_THAT(text, HasSubstr("all_reduce sum of 4 f32"));
  EXPECT_THAT(text, HasSubstr("broadcast of 3 f32 root 1"));
  EXPECT_EQ(text.find("nccl order"), text.rfind("nccl order"));  // one line
}

TEST_F(SimulatedNccl, AnAbortedOperationLeavesGarbageAndItsStreamSucceeds) {
  run_two([](Rank& me) {
    if (me.rank == 1) return;
    const Buffer<float> x(8, 1.0f);
    EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 8, ncclFloat32, ncclSum, me.comm, me.stream),
              ncclInProgress);
    OK(poll(me.comm, 5));
    EXPECT_TRUE(still_runs(me.stream));
    OK(ncclCommAbort(std::exchange(me.comm, nullptr)));
    OK(cudaStreamSynchronize(me.stream));
    const auto values = x.values();
    EXPECT_EQ(values[0], 1.0f);
    EXPECT_NEAR(values[7], 0.747, 1e-3);
  });
}

TEST_F(SimulatedNccl, AnAsynchronousErrorShowsWhileTheOperationSpins) {
  run_two([](Rank& me) {
    if (me.rank == 1) return;
    const Buffer<float> x(8, 1.0f);
    EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 8, ncclFloat32, ncclSum, me.comm, me.stream),
              ncclInProgress);
    OK(poll(me.comm, 5));
    inject("ncclAsyncError", 2, ncclRemoteError);
    EXPECT_EQ(poll(me.comm, 5), ncclSuccess);
    EXPECT_EQ(poll(me.comm, 5), ncclRemoteError);
    EXPECT_EQ(poll(me.comm, 5), ncclRemoteError);
    EXPECT_TRUE(still_runs(me.stream));
    EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 8, ncclFloat32, ncclSum, me.comm, me.stream),
              ncclRemoteError);
    OK(ncclCommAbort(std::exchange(me.comm, nullptr)));
    OK(cudaStreamSynchronize(me.stream));
  });
}

TEST_F(SimulatedNccl, AnswersWhatATestPlants) {
  inject("ncclGetUniqueId", 1, ncclSystemError);
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSystemError);
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
}

TEST_F(SimulatedNccl, TwoRanksOnOneDeviceAreRefused) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t comm = nullptr;
      OK(cudaSetDevice(0));
      EXPECT_EQ(ncclCommInitRank(&comm, 2, id, rank), ncclInvalidUsage);
      EXPECT_THAT(ncclGetLastError(comm), HasSubstr("Duplicate GPU detected"));
      OK(ncclCommAbort(comm));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(SimulatedNccl, RanksWithOtherIdsAreRefused) {
  const auto ids = new_ids(2), others = new_ids(1);
  const auto results = init_scalable(2, [&](int rank) {
    return rank == 0 ? ids : std::vector<ncclUniqueId>{ids[0], others[0]};
  });
  EXPECT_THAT(results, testing::Each(ncclInvalidUsage));
  EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr("has other ids"));
  EXPECT_THAT(init_scalable(2, [&](int) { return new_ids(3); }),
              testing::Each(ncclInvalidArgument));
  EXPECT_THAT(init_scalable(2, [](int) { return std::vector<ncclUniqueId>(2); }),
              testing::Each(ncclInvalidArgument));
}

}  // namespace
}  // namespace cairn::gpusim
