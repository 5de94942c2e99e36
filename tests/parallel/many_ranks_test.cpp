// Jobs of many ranks: they start, step and end, and no rank but the first holds more for it.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "group/coordinator.h"
#include "ranks.h"
#include "support/free_port.h"

namespace cairn::parallel {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kThreads = 24, kProcesses = 4;
#else
constexpr int kThreads = 256, kProcesses = 64;
#endif

void step(const ProcessGroup& group) {
  const int world = group.world_size();
  const Tensor gradient = Tensor::full({300}, group.rank() + 1.0), loss = Tensor::full({1}, 1.0);
  group.all_reduce(gradient, ReduceOp::sum, "gradient");
  group.broadcast(loss, world - 1, "loss");
  EXPECT_EQ(gradient.to_vector(), std::vector<double>(300, world * (world + 1) / 2.0));
}

TEST(ManyRanks, Threads) {
  auto groups = ProcessGroup::in_process(kThreads);
  std::vector<std::thread> threads;
  for (auto& group : groups) {
    threads.emplace_back([own = std::move(group)] {
      for (int i = 0; i < 3; ++i) step(own);
      own.barrier("end");
    });
  }
  groups.clear();
  for (std::thread& thread : threads) thread.join();
}

std::size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

TEST(ManyRanks, Processes) {
  const auto results = test::start_ranks(
      kProcesses,
      [](int rank) {
        const auto group =
            ProcessGroup::from_environment({.heartbeat_timeout = std::chrono::seconds(30)});
        for (int i = 0; i < 3; ++i) step(group);
        // A few sockets of the control plane and a segment of memory; those with children in the
        // tree and the store have a connection for each more.
        const bool has_children = rank * 16 + 1 < kProcesses;
        EXPECT_LE(open_files(), has_children ? 200u : 60u) << "rank " << rank;
        group.barrier("end");
      },
      100.0);
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, 0) << "rank " << rank << ":\n" << results[rank].output;
  }
}

// From 18 ranks on some besides rank 0 have children, who must learn where those listen. Rank 0,
// which has the store, is later than a store at work may take to answer.
TEST(ManyRanks, StartWithALateRankZero) {
  constexpr int kRanks = 20;
  const int port = test::free_port();
  const GroupOptions options{.heartbeat_timeout = std::chrono::seconds(30),
                             .rendezvous_timeout = std::chrono::seconds(30)};
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      JobEnvironment job{.rank = rank, .world_size = kRanks, .local_world_size = kRanks};
      job.master_port = port;
      job.token = "0123456789abcdef0123456789abcdef";
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
      try {
        join_processes(
            job, options, [](const std::string& /*reason*/) {}, [] { return std::string(); },
            std::chrono::milliseconds(rank == 0 ? 10'000 : 100))
            ->leave();
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, std::vector<std::string>(kRanks));
}

}  // namespace
}  // namespace cairn::parallel
