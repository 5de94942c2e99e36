// Ranks that are threads of this process, and tensors with values that every rank can make.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "cairn/parallel/process_group.h"

namespace cairn::test {

inline void run_threads(int world_size, const std::function<void(parallel::ProcessGroup&)>& body) {
  auto groups = parallel::ProcessGroup::in_process(
      world_size,
      {.timeout = std::chrono::seconds(10), .heartbeat_timeout = std::chrono::seconds(3)});
  std::vector<std::thread> threads;
  for (auto& one : groups) {
    threads.emplace_back([&body, group = std::move(one)]() mutable {
      try {
        body(group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << group.rank() << " threw: " << error.what();
      }
    });
  }
  groups.clear();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cairn::test
