#include "cairn/core/parallel_for.h"

#include <gtest/gtest.h>

#include <time.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cairn/core/stream.h"

namespace cairn::core {
namespace {

TEST(ParallelFor, CoversEachElementOnceInFixedChunks) {
  for (const std::int64_t n : {0, 1, 7, 64, 1000}) {
    for (const std::int64_t grain : {1, 10, 64, 5000}) {
      std::vector<int> hits(static_cast<std::size_t>(n), 0);
      parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        EXPECT_LE(end - begin, grain);
        for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
      });
      EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), std::int64_t{0}), n);
      for (int h : hits) EXPECT_EQ(h, 1);
    }
  }
}

// Processor time of the thread that waits while the other one sleeps 20 ms in each of ten loops.
double seconds_spent_waiting() {
  const auto spent = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  double first = 0, last = 0;
  for (int loop = 0; loop <= 10; ++loop) {
    parallel_for(2, 1, [&](std::int64_t begin, std::int64_t) {
      if (begin == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (begin == 1) (loop == 0 ? first : last) = spent();
    });
  }
  return last - first;
}

// Of 200 ms; as many as GOMP_SPINCOUNT says without the guard.
TEST(PassiveWait, ThreadsSleepWhileTheyWait) {
  const int threads = num_threads();
  set_num_threads(2);
  {
    const PassiveWaitGuard guard, another;
    EXPECT_LT(seconds_spent_waiting(), 0.02);
  }
  const PassiveWaitGuard again;
  EXPECT_LT(seconds_spent_waiting(), 0.02);
  set_num_threads(threads);
}

TEST(ParallelFor, RethrowsTheFirstChunksError) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    try {
      parallel_for(100, 1, [](std::int64_t begin, std::int64_t) {
        if (begin % 30 == 10) throw std::runtime_error(std::to_string(begin));
      });
      FAIL() << "nothing thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "10");
    }
  }
}

TEST(ParallelFor, NestsAndRunsInWorkerThreads) {
  std::atomic<int> count = 0;
  const auto nested = [&] {
    parallel_for(8, 1, [&](std::int64_t, std::int64_t) {
      parallel_for(8, 1, [&](std::int64_t, std::int64_t) { ++count; });
    });
  };
  nested();
  const Stream stream = Stream::create({});
  stream.submit(nested);
  std::thread other(nested);
  other.join();
  stream.synchronize();
  EXPECT_EQ(count, 3 * 64);
}

}  // namespace
}  // namespace cairn::core
