// Ranks of the tests: threads of this process.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "cairn/parallel/process_group.h"

namespace cairn::conformance {

/// Calls body in a thread for each rank; an exception fails the test and ends the other ranks.
inline void on_ranks(int ranks, const std::function<void(parallel::ProcessGroup&)>& body) {
  auto groups = parallel::ProcessGroup::in_process(ranks);
  std::vector<std::thread> threads;
  for (parallel::ProcessGroup& group : groups) {
    threads.emplace_back([&body, group = std::move(group)]() mutable {
      try {
        body(group);
      } catch (const std::exception& error) {
        group.abort(error.what());
        ADD_FAILURE() << error.what();
      }
    });
  }
  groups.clear();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cairn::conformance
