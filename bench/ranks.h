// What the programs of scripts/bench_parallel share: ranks that are children of this process, and
// how often a collective is timed.
#pragma once

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace bench {

/// The median and the fastest of `repeats` runs, in milliseconds; two more come first.
struct Times {
  double ms = 0, fastest_ms = 0;
};

inline Times time_runs(int repeats, const std::function<void()>& run) {
  std::vector<double> times;
  for (int i = -2; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - begin;
    if (i >= 0) times.push_back(taken.count());
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

/// The same on all ranks: as many as move 256 MiB, from 5 to 2000.
inline int repeats_of(std::size_t bytes) {
  return static_cast<int>(std::clamp<std::size_t>((std::size_t{256} << 20) / bytes, 5, 2000));
}

inline void print(const Times& times) {
  std::printf("{\"ms\": %.6f, \"fastest_ms\": %.6f}\n", times.ms, times.fastest_ms);
  std::fflush(stdout);
}

/// This process stays on one core; ranks take the cores in turn.
inline void bind_to_core(int rank) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(rank) % std::thread::hardware_concurrency(), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

/// body(rank) in a process for each rank; 0 where all of them returned.
inline int run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        _exit(1);
      }
      std::fflush(stdout);
      _exit(0);
    }
    children.push_back(child);
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) failed = 1;
  }
  return failed;
}

}  // namespace bench
