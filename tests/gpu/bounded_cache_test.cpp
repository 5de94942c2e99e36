// A cache of plans: each is made once, and nobody waits for the making of another.
#include "cuda/bounded_cache.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <stdexcept>

namespace cairn::kernels::cuda {
namespace {

TEST(BoundedCache, MakesEachValueOnce) {
  BoundedCache<int, int> cache(2);
  int made = 0;
  const auto make = [&] { return ++made; };
  EXPECT_EQ(cache.get(7, make), 1);
  EXPECT_EQ(cache.get(7, make), 1);
  EXPECT_EQ(cache.get(8, make), 2);
  EXPECT_EQ(cache.get(9, make), 3);  // full: it starts anew
  EXPECT_EQ(cache.get(7, make), 4);
}

// Ranks of threads, a GPU each: one times a product on its GPU, which waits for another rank's.
TEST(BoundedCache, TheMakingOfOneWaitsForThatOfAnother) {
  BoundedCache<int, int> cache(4);
  std::promise<void> begun, other_made;
  auto first = std::async(std::launch::async, [&] {
    return cache.get(0, [&] {
      begun.set_value();
      const auto status = other_made.get_future().wait_for(std::chrono::seconds(20));
      return status == std::future_status::ready ? 1 : -1;
    });
  });
  begun.get_future().wait();
  EXPECT_EQ(cache.get(1, [] { return 2; }), 2);
  other_made.set_value();
  EXPECT_EQ(first.get(), 1);
}

TEST(BoundedCache, AFailedMakingIsTriedAgain) {
  BoundedCache<int, int> cache(4);
  EXPECT_THROW(cache.get(0, []() -> int { throw std::runtime_error("no plan"); }),
               std::runtime_error);
  EXPECT_EQ(cache.get(0, [] { return 3; }), 3);
}

}  // namespace
}  // namespace cairn::kernels::cuda
