// Jobs of many ranks: they start, step and end, and no rank but the first holds more for it.
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "ranks.h"

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

}  // namespace
}  // namespace cairn::parallel
