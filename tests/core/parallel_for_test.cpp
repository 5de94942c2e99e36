#include "cairn/core/parallel_for.h"

#include <gtest/gtest.h>

#include <atomic>
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
